//! Properties: what must hold for whatever comes, tried with inputs at random. For tests.

use std::fmt::Debug;

use proptest::strategy::Strategy;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};

/// Inputs for each property, unless `PROPTEST_CASES` says otherwise.
const CASES: u32 = 1_000;
/// Repeats the inputs of a run that failed.
const SEED: &str = "BELLWIRE_SEED";

/// Tries the property, which asserts, on inputs of this kind; on failure the smallest one that was found is
/// shown, and what repeats it.
#[track_caller]
pub(crate) fn hold<S: Strategy>(inputs: &S, property: impl Fn(S::Value))
where
    S::Value: Debug,
{
    let given = std::env::var(SEED).ok();
    let seed = given.map_or_else(rand::random::<u64>, |text| text.parse().expect("a number"));
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&seed.to_le_bytes());
    let cases = std::env::var("PROPTEST_CASES").ok();
    let config = Config {
        cases: cases.map_or(CASES, |text| text.parse().expect("a number")),
        // The seed says the same without a file.
        failure_persistence: None,
        ..Config::default()
    };
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &bytes);
    let outcome = TestRunner::new_with_rng(config, rng).run(inputs, |input| {
        property(input);
        Ok(())
    });
    if let Err(error) = outcome {
        panic!("{error}\n{SEED}={seed} repeats it");
    }
}

/// Texts with everything that has ever been taken for something else.
pub(crate) fn texts() -> impl Strategy<Value = String> + Clone {
    let letters = proptest::sample::select(vec![
        "a", "b", "7", " ", ".", ",", "*", ">", "/", "~", "%", "'", "\"", "\\", "{", "}", "\n",
        "\r", "\0", "\t", "\u{7f}", "\u{85}", "\u{a0}", "é", "\u{2028}", "\u{202e}", "𝕏", "=", ":",
        "$", "-",
    ]);
    proptest::collection::vec(letters, 0..12).prop_map(|letters| letters.concat())
}
