//! TLS on a port of ours: its certificate, read again when its files have changed.
//!
//! Invariants:
//! - A handshake looks at the files once a second at most, and reads them only if they are others than those read last.
//! - Files that cannot be used change nothing: the certificate at hand serves on, and it is told once. Whoever renews
//!   writes one file after the other, so for a moment they may not fit.

use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustls::ServerConfig;
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;

use super::{PemFile, TlsError, unusable};

/// Between looks at the files.
const LOOK_PAUSE: Duration = Duration::from_secs(1);

/// What a port of ours needs to speak TLS. Reads the files.
///
/// # Errors
/// Names the option, the file and what is wrong with it.
pub(crate) fn server_config(
    certificate: (&'static str, &Path),
    key: (&'static str, &Path),
) -> Result<ServerConfig, TlsError> {
    let file = |(option, path): (&'static str, &Path)| PemFile {
        option,
        path: path.to_owned(),
    };
    let resolver = Arc::new(Renewable::read(file(certificate), file(key))?);
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    Ok(ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("ring supports the default protocol versions")
        .with_no_client_auth()
        .with_cert_resolver(resolver))
}

/// The certificate that is shown, and where it comes from.
#[derive(Debug)]
struct Renewable {
    certificate: PemFile,
    key: PemFile,
    shown: Mutex<Shown>,
}

#[derive(Debug)]
struct Shown {
    certified: Arc<CertifiedKey>,
    /// Of the files when they were read last, whether they could be used or not.
    read: [Option<Version>; 2],
    looked: Instant,
}

/// Two files of the same version hold the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Version {
    inode: u64,
    size: u64,
    modified: (i64, i64),
}

impl Version {
    /// None for a file that is not there.
    fn of(file: &PemFile) -> Option<Self> {
        let about = std::fs::metadata(&file.path).ok()?;
        Some(Self {
            inode: about.ino(),
            size: about.size(),
            modified: (about.mtime(), about.mtime_nsec()),
        })
    }
}

impl Renewable {
    fn read(certificate: PemFile, key: PemFile) -> Result<Self, TlsError> {
        // Looked at before they are read: what is written meanwhile is read again.
        let read = [&certificate, &key].map(Version::of);
        let shown = Shown {
            certified: certified(&certificate, &key)?,
            read,
            looked: Instant::now(),
        };
        Ok(Self {
            certificate,
            key,
            shown: Mutex::new(shown),
        })
    }

    fn current(&self, now: Instant) -> Arc<CertifiedKey> {
        // Nothing can panic while the lock is held.
        let mut shown = self.shown.lock().unwrap_or_else(PoisonError::into_inner);
        if now.saturating_duration_since(shown.looked) >= LOOK_PAUSE {
            shown.looked = now;
            let read = [&self.certificate, &self.key].map(Version::of);
            if read != shown.read {
                shown.read = read;
                match certified(&self.certificate, &self.key) {
                    Ok(certified) => {
                        shown.certified = certified;
                        tracing::info!(
                            file = %self.certificate.path.display(),
                            "the certificate was renewed"
                        );
                    }
                    Err(error) => tracing::warn!(
                        %error,
                        "the certificate cannot be renewed, the one at hand serves on"
                    ),
                }
            }
        }
        shown.certified.clone()
    }
}

impl ResolvesServerCert for Renewable {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.current(Instant::now()))
    }
}

fn certified(certificate: &PemFile, key: &PemFile) -> Result<Arc<CertifiedKey>, TlsError> {
    let provider = rustls::crypto::ring::default_provider();
    CertifiedKey::from_der(certificate.certificates()?, key.key()?, &provider)
        .map(Arc::new)
        .map_err(|error| unusable(certificate, key, error))
}
