//! What went wrong and when, for the judge: written by those who do it.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use crate::judge::Window;
use crate::schedule::{Fault, Target};

/// Without another fault for so long before a kill, the takeover is the killed relay's alone.
const UNDISTURBED: Duration = Duration::from_secs(3);

/// How long buckets of a killed relay were without an owner.
#[derive(Clone, Debug)]
pub struct Takeover {
    pub took: Duration,
    /// Was something else wrong at that time?
    pub disturbed: bool,
}

#[derive(Default)]
pub struct Book {
    pub windows: Mutex<Vec<Window>>,
    pub takeovers: Mutex<Vec<Takeover>>,
    /// What a relay itself did wrong: it ended, or did not end.
    pub failures: Mutex<Vec<String>>,
}

impl Book {
    /// A fault begins. Answers its number.
    pub fn begin(&self, fault: &Fault) -> usize {
        let relay = match fault.target {
            Target::Relay(relay) => Some(relay),
            Target::Postgres | Target::Broker => None,
        };
        let mut windows = self.windows.lock().unwrap();
        windows.push(Window {
            what: format!("{:?}", fault.kind),
            relay,
            repeats: fault.kind.repeats(),
            from: Instant::now(),
            until: None,
        });
        windows.len() - 1
    }

    pub fn end(&self, number: usize) {
        self.windows.lock().unwrap()[number].until = Some(Instant::now());
    }

    /// This machine itself did nothing for a while: leases end without any fault of ours.
    pub fn stall(&self, from: Instant) {
        self.windows.lock().unwrap().push(Window {
            what: "Stall".to_owned(),
            relay: None,
            repeats: true,
            from,
            until: Some(Instant::now()),
        });
    }

    pub fn fail(&self, what: String) {
        eprintln!("chaos: {what}");
        self.failures.lock().unwrap().push(what);
    }

    /// The relay that was killed in this window at this time has no bucket any more.
    pub fn taken_over(&self, number: usize, killed: Instant) {
        let took = killed.elapsed();
        let windows = self.windows.lock().unwrap();
        let disturbed = windows.iter().enumerate().any(|(other, window)| {
            other != number
                && window
                    .until
                    .is_none_or(|until| until + UNDISTURBED >= killed)
        });
        eprintln!("chaos: buckets taken over after {took:?}, disturbed: {disturbed}");
        self.takeovers
            .lock()
            .unwrap()
            .push(Takeover { took, disturbed });
    }
}
