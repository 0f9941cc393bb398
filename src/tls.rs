//! TLS: whom to trust, who we are, and what went wrong; towards servers, and on a port of ours.
//!
//! Files are read again for each connection, so that renewed certificates need no restart. A message
//! names the option, the file and the remedy, and never shows what a key file holds.

use std::error::Error;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, WebPkiSupportedAlgorithms};
use rustls::crypto::{verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::{AlertDescription, CertificateError, InconsistentKeys};
use rustls::{ClientConfig, DigitallySignedStruct, RootCertStore, SignatureScheme};

mod served;

pub(crate) use served::server_config;

/// How much of the server's certificate is verified.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verify {
    /// Only that the server holds the key of whatever certificate it shows.
    Nothing,
    /// That a trusted CA signed it.
    Chain,
    /// That a trusted CA signed it for the name we connect to.
    ChainAndName,
}

/// A PEM file, and the option that names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PemFile {
    pub(crate) option: &'static str,
    pub(crate) path: PathBuf,
}

/// What one server's connections need.
#[derive(Clone, Debug)]
pub(crate) struct Tls {
    pub(crate) verify: Verify,
    /// The option that would name a CA.
    pub(crate) ca_option: &'static str,
    /// None: the system's roots.
    pub(crate) ca: Option<PemFile>,
    /// Our certificate and its key.
    pub(crate) identity: Option<(PemFile, PemFile)>,
}

/// A file that cannot be used.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{option}: {reason}")]
pub(crate) struct TlsError {
    pub(crate) option: &'static str,
    pub(crate) reason: String,
}

impl PemFile {
    fn error(&self, what: impl std::fmt::Display) -> TlsError {
        TlsError {
            option: self.option,
            reason: format!("{} {what}", self.path.display()),
        }
    }

    fn read(&self) -> Result<Vec<u8>, TlsError> {
        std::fs::read(&self.path).map_err(|error| self.error(format!("cannot be read: {error}")))
    }

    /// The parser's own texts may quote the file.
    fn malformed(&self, error: &pem::Error, wanted: &str) -> TlsError {
        match error {
            pem::Error::NoItemsFound => self.error(format!("holds no {wanted} in PEM form")),
            _ => self.error(format!("is damaged: it must hold a {wanted} in PEM form")),
        }
    }

    fn certificates(&self) -> Result<Vec<CertificateDer<'static>>, TlsError> {
        let text = self.read()?;
        let certificates: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&text).collect();
        match certificates {
            Ok(found) if found.is_empty() => Err(pem::Error::NoItemsFound),
            other => other,
        }
        .map_err(|error| self.malformed(&error, "certificate"))
    }

    fn key(&self) -> Result<PrivateKeyDer<'static>, TlsError> {
        let text = self.read()?;
        // Both forms of encrypted keys say so in plain text.
        if text.windows(9).any(|bytes| bytes == b"ENCRYPTED") {
            return Err(self.error(
                "is encrypted with a passphrase, and nobody is here to type it: decrypt it \
                 (openssl pkey -in … -out …)",
            ));
        }
        PrivateKeyDer::from_pem_slice(&text).map_err(|error| self.malformed(&error, "private key"))
    }
}

/// What a section names, each with its option: a CA, our certificate and its key.
pub(crate) type Files<'a> = [(&'static str, Option<&'a Path>); 3];

impl Tls {
    /// With these files, towards servers that must show a certificate for their name. Opens none.
    ///
    /// # Errors
    /// Names the file that does not go with the rest.
    pub(crate) fn by_files([(ca_option, ca), certificate, key]: Files) -> Result<Self, TlsError> {
        Ok(Self {
            verify: Verify::ChainAndName,
            ca_option,
            ca: ca.map(|path| PemFile {
                option: ca_option,
                path: path.to_owned(),
            }),
            identity: identity(certificate, key)?,
        })
    }

    /// The same where TLS is asked for; elsewhere none, and no file may be named: `why` says what asks for it.
    ///
    /// # Errors
    /// Names the file that does not go with the rest.
    pub(crate) fn if_asked_for(
        asked_for: bool,
        files: Files,
        why: &str,
    ) -> Result<Option<Self>, TlsError> {
        if asked_for {
            return Self::by_files(files).map(Some);
        }
        match files.into_iter().find(|(_, path)| path.is_some()) {
            Some((option, _)) => Err(TlsError {
                option,
                reason: why.to_owned(),
            }),
            None => Ok(None),
        }
    }

    /// Reads the files.
    ///
    /// # Errors
    /// Names the option, the file and what is wrong with it.
    pub(crate) fn client_config(&self) -> Result<ClientConfig, TlsError> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let algorithms = provider.signature_verification_algorithms;
        let verifier: Arc<dyn ServerCertVerifier> = match self.verify {
            Verify::Nothing => Arc::new(Lenient {
                chain: None,
                algorithms,
            }),
            Verify::Chain => Arc::new(Lenient {
                chain: Some(self.verifier(&provider)?),
                algorithms,
            }),
            Verify::ChainAndName => self.verifier(&provider)?,
        };
        let builder = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .expect("ring supports the default protocol versions")
            .dangerous()
            .with_custom_certificate_verifier(verifier);
        let Some((certificate, key)) = &self.identity else {
            return Ok(builder.with_no_client_auth());
        };
        builder
            .with_client_auth_cert(certificate.certificates()?, key.key()?)
            .map_err(|error| unusable(certificate, key, error))
    }

    fn verifier(
        &self,
        provider: &Arc<CryptoProvider>,
    ) -> Result<Arc<WebPkiServerVerifier>, TlsError> {
        let roots = match &self.ca {
            Some(file) => file_roots(file)?,
            None => self.system_roots()?,
        };
        let builder =
            WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider.clone());
        Ok(builder
            .build()
            .expect("there are roots, and no revocation lists"))
    }

    fn system_roots(&self) -> Result<RootCertStore, TlsError> {
        let mut roots = RootCertStore::empty();
        // An odd certificate in the system's store is no reason not to start.
        roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        if roots.is_empty() {
            return Err(TlsError {
                option: self.ca_option,
                reason: "is not given, and the system trusts no CA to verify the server by: \
                         install ca-certificates, or name a file with the server's CA"
                    .into(),
            });
        }
        Ok(roots)
    }
}

/// Which of the two cannot be used, and why.
fn unusable(certificate: &PemFile, key: &PemFile, error: rustls::Error) -> TlsError {
    match error {
        rustls::Error::InconsistentKeys(InconsistentKeys::KeyMismatch) => key.error(format!(
            "does not fit the certificate in {}",
            certificate.path.display()
        )),
        rustls::Error::InvalidCertificate(error) => {
            certificate.error(format!("holds no usable certificate: {error}"))
        }
        error => key.error(format!("holds no usable key: {error}")),
    }
}

fn file_roots(file: &PemFile) -> Result<RootCertStore, TlsError> {
    let mut roots = RootCertStore::empty();
    for (index, certificate) in file.certificates()?.into_iter().enumerate() {
        roots.add(certificate).map_err(|error| {
            file.error(format!(
                "holds no usable CA certificate at place {}: {error}",
                index + 1
            ))
        })?;
    }
    Ok(roots)
}

/// Verifies less than name and chain. The handshake's signature is always checked.
#[derive(Debug)]
struct Lenient {
    chain: Option<Arc<WebPkiServerVerifier>>,
    algorithms: WebPkiSupportedAlgorithms,
}

impl ServerCertVerifier for Lenient {
    fn verify_server_cert(
        &self,
        certificate: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        let Some(chain) = &self.chain else {
            return Ok(ServerCertVerified::assertion());
        };
        match chain.verify_server_cert(certificate, intermediates, name, ocsp_response, now) {
            // The name is looked at last: all else was right.
            Err(rustls::Error::InvalidCertificate(
                CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
            )) => Ok(ServerCertVerified::assertion()),
            other => other,
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls12_signature(message, certificate, signature, &self.algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(message, certificate, signature, &self.algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.algorithms.supported_schemes()
    }
}

/// Is it about TLS, at the server's side or in between, rather than about our own files?
pub(crate) fn handshake_failed(error: &(dyn Error + 'static)) -> bool {
    find::<rustls::Error>(error).is_some()
}

/// If it is about TLS: which check failed, and which option of `section` mends it.
pub(crate) fn explain(error: &(dyn Error + 'static), section: &str) -> Option<String> {
    if let Some(error) = find::<TlsError>(error) {
        return Some(error.to_string());
    }
    let reason = match find::<rustls::Error>(error)? {
        rustls::Error::InvalidCertificate(error) => refused_certificate(error, section),
        rustls::Error::AlertReceived(alert) => refused_by_server(*alert, section),
        rustls::Error::InvalidMessage(_) => format!(
            "what answers does not speak TLS: is the port of {section}.url the one for TLS?"
        ),
        other => other.to_string(),
    };
    Some(format!("TLS: {reason}"))
}

fn refused_certificate(error: &CertificateError, section: &str) -> String {
    match error {
        // A CA of the right name with another key gives the second.
        CertificateError::UnknownIssuer | CertificateError::BadSignature => format!(
            "the server's certificate is signed by no CA that is trusted here: name a file with \
             the right CA in {section}.ca_file"
        ),
        CertificateError::NotValidForNameContext {
            expected,
            presented,
        } => {
            let names = match presented.as_slice() {
                [] => "for no name (one in subjectAltName is needed)".to_owned(),
                names => format!("for {}", plain(names)),
            };
            let or = match section {
                "database" => ", or leave the name unchecked by sslmode=verify-ca",
                _ => "",
            };
            format!(
                "the server's certificate is {names}, not for {}: connect by its name in \
                 {section}.url{or}",
                expected.to_str()
            )
        }
        CertificateError::Expired | CertificateError::ExpiredContext { .. } => {
            format!("the server's certificate, or that of its CA, has expired: renew it ({error})")
        }
        CertificateError::Other(other) if other.to_string().contains("CaUsedAsEndEntity") => {
            "the server shows a CA's certificate (self-signed, perhaps): give it one of its own, \
             signed by that CA"
                .into()
        }
        other => format!("the server's certificate is refused: {other}"),
    }
}

/// `localhost, 127.0.0.1` for `DnsName("localhost")` and `IpAddress(127.0.0.1)`, as webpki has them.
fn plain(names: &[String]) -> String {
    let names: Vec<_> = names
        .iter()
        .map(|name| {
            let inner = name
                .split_once('(')
                .map_or(name.as_str(), |(_, inner)| inner);
            inner.trim_end_matches(')').trim_matches('"')
        })
        .collect();
    names.join(", ")
}

fn refused_by_server(alert: AlertDescription, section: &str) -> String {
    use AlertDescription as Alert;
    match alert {
        Alert::CertificateRequired
        | Alert::HandshakeFailure
        | Alert::BadCertificate
        | Alert::UnsupportedCertificate
        | Alert::CertificateRevoked
        | Alert::CertificateExpired
        | Alert::CertificateUnknown
        | Alert::UnknownCA
        | Alert::AccessDenied => format!(
            "the server refused the handshake ({alert:?}): it may want a client certificate, \
             signed by a CA that it trusts ({section}.cert_file and {section}.key_file)"
        ),
        other => format!("the server refused the handshake ({other:?})"),
    }
}

/// Looks into what `io::Error` carries, which is not its `source`.
fn find<'a, T: Error + 'static>(error: &'a (dyn Error + 'static)) -> Option<&'a T> {
    let mut next = Some(error);
    while let Some(error) = next {
        if let Some(found) = error.downcast_ref::<T>() {
            return Some(found);
        }
        next = match error
            .downcast_ref::<io::Error>()
            .and_then(io::Error::get_ref)
        {
            Some(inner) => Some(inner),
            None => error.source(),
        };
    }
    None
}

/// Certificate and key are given together or not at all.
pub(crate) fn identity(
    (cert_option, cert): (&'static str, Option<&Path>),
    (key_option, key): (&'static str, Option<&Path>),
) -> Result<Option<(PemFile, PemFile)>, TlsError> {
    let file = |option, path: &Path| PemFile {
        option,
        path: path.to_owned(),
    };
    let alone = |option, missing| TlsError {
        option,
        reason: format!("is given without {missing}: give both (one file may hold both)"),
    };
    match (cert, key) {
        (Some(cert), Some(key)) => Ok(Some((file(cert_option, cert), file(key_option, key)))),
        (None, None) => Ok(None),
        (Some(_), None) => Err(alone(cert_option, key_option)),
        (None, Some(_)) => Err(alone(key_option, cert_option)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn explained(error: rustls::Error, section: &str) -> String {
        // As the drivers hand it on.
        let error = io::Error::new(io::ErrorKind::InvalidData, error);
        assert!(handshake_failed(&error));
        explain(&error, section).unwrap()
    }

    #[test]
    fn each_failed_check_names_the_option_that_mends_it() {
        let unknown = rustls::Error::InvalidCertificate(CertificateError::UnknownIssuer);
        assert!(explained(unknown.clone(), "database").ends_with("database.ca_file"));
        assert!(explained(unknown, "rabbitmq").ends_with("rabbitmq.ca_file"));
        let name = |presented: &[&str]| {
            rustls::Error::InvalidCertificate(CertificateError::NotValidForNameContext {
                expected: ServerName::try_from("mq.example").unwrap(),
                presented: presented.iter().map(|&name| name.to_owned()).collect(),
            })
        };
        let both = name(&[r#"DnsName("a.example")"#, "IpAddress(10.0.0.7)"]);
        assert_eq!(
            explained(both, "rabbitmq"),
            "TLS: the server's certificate is for a.example, 10.0.0.7, not for mq.example: connect \
             by its name in rabbitmq.url"
        );
        assert!(explained(name(&[]), "database").contains("subjectAltName"));
        assert!(explained(name(&[]), "database").contains("sslmode=verify-ca"));
        let alert = rustls::Error::AlertReceived(AlertDescription::CertificateRequired);
        assert!(explained(alert, "rabbitmq").contains("rabbitmq.cert_file"));
    }

    #[test]
    fn what_is_not_about_tls_is_left_to_others() {
        let error = io::Error::from(io::ErrorKind::ConnectionRefused);
        assert_eq!(explain(&error, "database"), None);
        assert!(!handshake_failed(&error));
    }
}
