//! The shared servers, for tests that stop and kill them.

use std::path::PathBuf;

use tokio::process::Command;

/// The script that runs the private servers.
pub struct Services {
    script: PathBuf,
    directory: PathBuf,
}

impl Services {
    /// None, said loudly, when the servers are not ours to stop.
    pub fn ours() -> Option<Self> {
        let Some(directory) = std::env::var_os("BELLWIRE_TEST_SERVICES_DIR") else {
            eprintln!(
                "SKIPPED: the servers were given by URL and are not ours to stop; unset DATABASE_URL and AMQP_URL"
            );
            return None;
        };
        Some(Self {
            script: PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("scripts/services"),
            directory: directory.into(),
        })
    }

    /// For example `["kill", "rabbitmq"]`.
    pub async fn run(&self, arguments: &[&str]) {
        let status = Command::new(&self.script)
            .arg(arguments[0])
            .arg("--dir")
            .arg(&self.directory)
            .args(&arguments[1..])
            .stdin(std::process::Stdio::null())
            .stdout(std::process::Stdio::null())
            .status()
            .await
            .unwrap();
        assert!(status.success(), "services {arguments:?}: {status}");
    }

    /// Standard output of `rabbitmqctl` on the private node. Takes seconds: it starts an Erlang system.
    pub async fn rabbitmqctl(&self, arguments: &[&str]) -> String {
        let output = Command::new(&self.script)
            .args(["rabbitmqctl", "--dir"])
            .arg(&self.directory)
            .args(arguments)
            .stdin(std::process::Stdio::null())
            .output()
            .await
            .unwrap();
        let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
        assert!(
            output.status.success(),
            "rabbitmqctl {arguments:?}: {}",
            text(&output.stderr)
        );
        text(&output.stdout)
    }

    /// As [`Self::run`], for a guard's drop. Failures are shown, not raised.
    pub fn run_blocking(&self, arguments: &[&str]) {
        self.blocking(&[
            &[arguments[0], "--dir"],
            [self.directory.to_str().unwrap()].as_slice(),
            &arguments[1..],
        ]);
    }

    /// As [`Self::rabbitmqctl`], for a guard's drop. Failures are shown, not raised.
    pub fn rabbitmqctl_blocking(&self, arguments: &[&str]) {
        self.blocking(&[
            &["rabbitmqctl", "--dir"],
            [self.directory.to_str().unwrap()].as_slice(),
            arguments,
        ]);
    }

    fn blocking(&self, arguments: &[&[&str]]) {
        let status = std::process::Command::new(&self.script)
            .args(arguments.concat())
            .stdin(std::process::Stdio::null())
            .stdout(std::process::Stdio::null())
            .status();
        if !status.as_ref().is_ok_and(std::process::ExitStatus::success) {
            eprintln!("services {arguments:?}: {status:?}");
        }
    }
}
