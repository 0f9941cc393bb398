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
            eprintln!("SKIPPED: the servers were given by URL and are not ours to stop; unset DATABASE_URL and AMQP_URL");
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
}
