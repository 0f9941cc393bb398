//! A relay's own idea of what time it is: a library is preloaded into its process, made by the C compiler that the crate
//! needs anyway. What it shows can be set while the relay runs.

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

const SOURCE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/chaos/clock.c");
/// Seconds by which the clocks of a fleet differ from the servers': nobody has set them.
const WRONG: [i64; 4] = [-3 * 24 * 3_600, 7 * 3_600, -40, 400 * 24 * 3_600];
/// A day, as when a host's time is set by hand, or by a time server after a long suspension.
pub const JUMP: i64 = 24 * 3_600;
/// A log's first line may be this much older than the look at it.
const TOLERANCE: i64 = 30;

pub struct Clock {
    library: PathBuf,
    file: PathBuf,
    wrong: i64,
}

impl Clock {
    /// Of the relay of this number; its files lie in `folder`.
    pub fn new(folder: &Path, number: usize) -> Self {
        let library = folder.join("clock.so");
        if !library.exists() {
            let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".to_owned());
            let made = std::process::Command::new(&compiler)
                .args(["-O2", "-shared", "-fPIC", "-o"])
                .args([library.as_path(), Path::new(SOURCE)])
                .status();
            assert!(
                made.as_ref().is_ok_and(std::process::ExitStatus::success),
                "{compiler} cannot make the library that sets a relay's clock: {made:?}"
            );
        }
        let clock = Self {
            library,
            file: folder.join(format!("clock-{number}")),
            wrong: WRONG[number % WRONG.len()],
        };
        clock.jump(0);
        clock
    }

    /// What a process needs to have this clock.
    pub fn environment(&self) -> [(String, String); 2] {
        let shown = |path: &Path| path.to_str().unwrap().to_owned();
        [
            ("LD_PRELOAD".to_owned(), shown(&self.library)),
            ("CLOCK_OFFSET".to_owned(), shown(&self.file)),
        ]
    }

    /// It is off by this much more, at once.
    pub fn jump(&self, by: i64) {
        use std::io::Write as _;
        // Written over, since the relay has mapped this very file.
        let mut file = std::fs::OpenOptions::new();
        let mut file = file
            .create(true)
            .truncate(false)
            .write(true)
            .open(&self.file)
            .unwrap();
        file.write_all(&(self.wrong + by).to_ne_bytes()).unwrap();
    }

    /// Panics unless the first line of this log is of the time that this clock shows: nothing would be tested.
    pub fn check(&self, log: &str) {
        let told = log.split_whitespace().next().unwrap_or_default();
        let told = humantime::parse_rfc3339_weak(told)
            .unwrap_or_else(|_| panic!("no time at the head of {log}"));
        let seconds = |time: SystemTime| {
            let since: Duration = time.duration_since(SystemTime::UNIX_EPOCH).unwrap();
            i64::try_from(since.as_secs()).unwrap()
        };
        let off = seconds(told) - seconds(SystemTime::now()) - self.wrong;
        assert!(
            off.abs() <= TOLERANCE,
            "this relay's clock is {off} s from where it was set: {log}"
        );
    }
}
