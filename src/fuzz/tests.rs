//! A short form of `make fuzz`: seeds, and what chance makes of them.

use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};

use super::*;

/// For each target. Longer runs are libFuzzer's matter.
const TIME: Duration = Duration::from_millis(250);
/// Far more than any input of this size takes.
const PATIENCE: Duration = Duration::from_secs(20);
const LONGEST: usize = 4_096;
/// What parsers look for.
const PIECES: [&[u8]; 24] = [
    b"\0",
    b"\n",
    b"'",
    b"\"",
    b"\\",
    b"{",
    b"}",
    b"[",
    b"]",
    b"*",
    b"$",
    b":",
    b";",
    b"/*",
    b"--",
    b"%",
    b"=",
    b"?",
    b"@",
    b"~1",
    b"\\u0000",
    b"\xff",
    b"999999999999999999999",
    b"\xe2\x80\xa8",
];

fn corpus(target: &str) -> PathBuf {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus");
    corpus.join(target)
}

fn seeds(target: &str) -> Vec<Vec<u8>> {
    let files =
        std::fs::read_dir(corpus(target)).unwrap_or_else(|_| panic!("{target} has no seeds"));
    let read =
        |file: std::io::Result<std::fs::DirEntry>| std::fs::read(file.unwrap().path()).unwrap();
    let mut seeds: Vec<_> = files.map(read).collect();
    seeds.sort();
    assert!(!seeds.is_empty(), "{target} has no seeds");
    seeds
}

fn mutated(rng: &mut StdRng, seeds: &[Vec<u8>]) -> Vec<u8> {
    let mut bytes = seeds[rng.random_range(0..seeds.len())].clone();
    for _ in 0..rng.random_range(1..6) {
        let at = rng.random_range(0..=bytes.len());
        let end = rng.random_range(at..=bytes.len().min(at + 32));
        match rng.random_range(0..5) {
            0 => drop(bytes.drain(at..end)),
            1 => bytes.insert(at, rng.random()),
            2 => drop(bytes.splice(at..at, PIECES[rng.random_range(0..PIECES.len())].to_vec())),
            3 => {
                let piece = bytes[at..end].repeat(rng.random_range(1..20));
                bytes.splice(at..at, piece);
            }
            _ => {
                let other = &seeds[rng.random_range(0..seeds.len())];
                bytes.truncate(at);
                bytes.extend(&other[rng.random_range(0..=other.len())..]);
            }
        }
        bytes.truncate(LONGEST);
    }
    bytes
}

/// Feeds one target, and shows the input that it could not take, or took too long for.
fn feed(name: &str, target: Target, seed: u64) {
    let seeds = seeds(name);
    let mut rng = StdRng::seed_from_u64(seed);
    let now_fed = Mutex::new(Vec::new());
    let shown = || {
        now_fed
            .lock()
            .map_or_else(|bytes| bytes.into_inner().clone(), |bytes| bytes.clone())
    };
    let (fed, progress) = channel();
    std::thread::scope(|scope| {
        let now_fed = &now_fed;
        let feeding = scope.spawn(move || {
            let began = Instant::now();
            for number in 0.. {
                let bytes = seeds
                    .get(number)
                    .cloned()
                    .unwrap_or_else(|| mutated(&mut rng, &seeds));
                now_fed.lock().unwrap().clone_from(&bytes);
                target(&bytes);
                fed.send(()).unwrap();
                if number >= seeds.len() && began.elapsed() > TIME {
                    break;
                }
            }
        });
        loop {
            match progress.recv_timeout(PATIENCE) {
                Ok(()) => {}
                Err(RecvTimeoutError::Disconnected) => break,
                Err(RecvTimeoutError::Timeout) => {
                    // A thread cannot be ended: no failure would ever be reported.
                    eprintln!("{name} hangs on {}", shown().escape_ascii());
                    std::process::abort();
                }
            }
        }
        assert!(
            feeding.join().is_ok(),
            "{name} fails on b\"{}\" (seed {seed})",
            shown().escape_ascii()
        );
    });
}

#[test]
fn no_input_from_outside_makes_a_parser_panic_or_hang() {
    let given = std::env::var("BELLWIRE_SEED").ok();
    let seed = given.map_or_else(rand::random, |text| text.parse().unwrap());
    for (name, target) in TARGETS {
        feed(name, *target, seed);
    }
}

#[test]
fn each_target_has_its_binary() {
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/Cargo.toml");
    let manifest = std::fs::read_to_string(manifest).unwrap();
    for (name, _) in TARGETS {
        let file = format!("fuzz_targets/{name}.rs");
        assert!(manifest.contains(&format!("path = \"{file}\"")), "{name}");
        let text = corpus("..").join(&file);
        let text = std::fs::read_to_string(text).unwrap();
        assert!(text.contains(&format!("run(\"{name}\", bytes)")), "{name}");
    }
}
