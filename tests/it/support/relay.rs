//! The binary as a process: a relay, or any other command.

use std::process::{ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use tokio::io::{AsyncBufReadExt as _, AsyncRead, BufReader};
use tokio::process::{Child, Command};

/// As the value of a setting: the variable is removed.
pub const UNSET: &str = "\0unset";

/// A process of the binary. Killed when dropped.
pub struct Relay {
    pub name: String,
    child: Child,
    output: Arc<Mutex<Vec<String>>>,
    stdout: Arc<Mutex<Vec<String>>>,
}

/// A process that has ended.
pub struct Run {
    pub status: ExitStatus,
    pub stdout: String,
    pub stderr: String,
}

impl Relay {
    /// `settings` are options such as `("relay.lease", "5s")`; a key without a dot is a plain variable,
    /// which [`UNSET`] removes.
    pub fn start(
        environment: &[(String, String)],
        settings: &[(&str, &str)],
        arguments: &[&str],
    ) -> Self {
        let name = format!("r{:08x}", rand::random::<u32>());
        let mut command = Command::new(env!("CARGO_BIN_EXE_bellwire"));
        command
            .args(arguments)
            .env_clear()
            .envs(
                std::env::vars_os()
                    .filter(|(key, _)| !key.to_string_lossy().starts_with("BELLWIRE_")),
            )
            .envs(environment.iter().cloned())
            .env("BELLWIRE_RELAY__NAME", &name)
            .env("BELLWIRE_RELAY__LEASE", "5s")
            .env("BELLWIRE_RABBITMQ__CONFIRM_TIMEOUT", "3s")
            .current_dir(std::env::temp_dir())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true);
        for (key, value) in settings {
            if let Some((section, option)) = key.split_once('.') {
                command.env(
                    format!(
                        "BELLWIRE_{}__{}",
                        section.to_uppercase(),
                        option.to_uppercase()
                    ),
                    value,
                );
            } else if *value == UNSET {
                command.env_remove(key);
            } else {
                command.env(key, value);
            }
        }
        let mut child = command.spawn().unwrap();
        let output = collect(child.stderr.take().unwrap());
        let stdout = collect(child.stdout.take().unwrap());
        Self {
            name,
            child,
            output,
            stdout,
        }
    }

    fn pid(&self) -> Pid {
        let pid = self.child.id().expect("still running");
        Pid::from_raw(i32::try_from(pid).unwrap()).unwrap()
    }

    /// Of the process, while it runs.
    pub fn id(&self) -> u32 {
        self.child.id().expect("still running")
    }

    /// SIGKILL, and waits until it is gone.
    pub async fn kill(&mut self) {
        self.child.kill().await.unwrap();
    }

    pub fn signal(&self, signal: Signal) {
        kill_process(self.pid(), signal).unwrap();
    }

    /// SIGSTOP.
    pub fn freeze(&self) {
        self.signal(Signal::STOP);
    }

    /// SIGCONT.
    pub fn thaw(&self) {
        self.signal(Signal::CONT);
    }

    /// SIGTERM, and waits for the end.
    pub async fn terminate(&mut self, within: Duration) -> ExitStatus {
        self.signal(Signal::TERM);
        self.exited(within).await
    }

    pub async fn exited(&mut self, within: Duration) -> ExitStatus {
        match tokio::time::timeout(within, self.child.wait()).await {
            Ok(status) => status.unwrap(),
            Err(_) => panic!("still running after {within:?}\n{}", self.log()),
        }
    }

    pub fn is_running(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }

    pub async fn finished(mut self, within: Duration) -> Run {
        let status = self.exited(within).await;
        // The pipes are read to their ends by now or in a moment.
        tokio::time::sleep(Duration::from_millis(50)).await;
        Run {
            status,
            stdout: self.stdout.lock().unwrap().join("\n"),
            stderr: self.log(),
        }
    }

    /// Everything it wrote to standard error.
    pub fn log(&self) -> String {
        self.output.lock().unwrap().join("\n")
    }

    /// Lines that it wrote to standard output so far.
    pub fn printed(&self) -> Vec<String> {
        self.stdout.lock().unwrap().clone()
    }

    /// Waits until it has written so many lines to standard output.
    pub async fn until_printed(&self, lines: usize, within: Duration) -> Vec<String> {
        let began = Instant::now();
        loop {
            let printed = self.printed();
            if printed.len() >= lines {
                return printed;
            }
            assert!(
                began.elapsed() < within,
                "not {lines} lines within {within:?}: {printed:#?}\n{}",
                self.log()
            );
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// Lines of its log that contain this text.
    pub fn logged(&self, text: &str) -> usize {
        self.output
            .lock()
            .unwrap()
            .iter()
            .filter(|line| line.contains(text))
            .count()
    }

    /// Waits until its log contains this text.
    pub async fn until_logged(&self, text: &str, within: Duration) {
        let began = Instant::now();
        while self.logged(text) == 0 {
            assert!(
                began.elapsed() < within,
                "not logged within {within:?}: {text}\n{}",
                self.log()
            );
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
}

impl Drop for Relay {
    /// The log of a relay whose test failed is part of what is shown.
    fn drop(&mut self) {
        if std::thread::panicking() {
            let log = self.log();
            let lines: Vec<_> = log.lines().collect();
            eprintln!(
                "---- log of {}\n{}",
                self.name,
                lines[lines.len().saturating_sub(200)..].join("\n")
            );
        }
    }
}

fn collect(stream: impl AsyncRead + Send + Unpin + 'static) -> Arc<Mutex<Vec<String>>> {
    let lines = Arc::new(Mutex::new(Vec::new()));
    let sink = lines.clone();
    tokio::spawn(async move {
        let mut reader = BufReader::new(stream).lines();
        while let Ok(Some(line)) = reader.next_line().await {
            sink.lock().unwrap().push(line);
        }
    });
    lines
}
