//! The ways into the private servers that are encrypted.

use std::path::PathBuf;

/// What `scripts/services` made for them.
pub struct TlsServers {
    directory: PathBuf,
    /// Takes whoever comes, with TLS or without.
    pub postgres: String,
    /// Takes only who shows `client.crt`.
    pub postgres_by_certificate: String,
    /// Takes only who shows `client.crt`.
    pub amqps: String,
}

impl TlsServers {
    /// None, said loudly, when the servers are not ours and may speak no TLS.
    pub fn ours() -> Option<Self> {
        let variable = |name: &str| std::env::var(format!("BELLWIRE_TEST_{name}")).ok();
        let found = (
            variable("TLS_DIR"),
            variable("POSTGRES_TLS_URL"),
            variable("POSTGRES_CERTIFICATE_URL"),
            variable("AMQPS_URL"),
        );
        let (Some(directory), Some(postgres), Some(postgres_by_certificate), Some(amqps)) = found
        else {
            eprintln!(
                "SKIPPED: no servers with TLS; unset DATABASE_URL and AMQP_URL, then `make stop test`"
            );
            return None;
        };
        Some(Self {
            directory: directory.into(),
            postgres,
            postgres_by_certificate,
            amqps,
        })
    }

    /// `ca.crt`, `client.crt`, `client.key`, and `other-…` which the servers do not trust.
    pub fn file(&self, name: &str) -> String {
        let path = self.directory.join(name);
        path.to_str().unwrap().to_owned()
    }

    /// Both servers by TLS, with their CA and our certificate.
    pub fn settings(&self) -> Vec<(&'static str, String)> {
        vec![
            ("DATABASE_URL", self.postgres_by_certificate.clone()),
            ("database.ca_file", self.file("ca.crt")),
            ("database.cert_file", self.file("client.crt")),
            ("database.key_file", self.file("client.key")),
            ("AMQP_URL", self.amqps.clone()),
            ("rabbitmq.ca_file", self.file("ca.crt")),
            ("rabbitmq.cert_file", self.file("client.crt")),
            ("rabbitmq.key_file", self.file("client.key")),
        ]
    }
}
