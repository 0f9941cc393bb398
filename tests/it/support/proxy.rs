//! A TCP proxy that can delay, swallow and cut.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

/// The whole message, as PostgreSQL's simple query protocol has it.
const COMMIT: &[u8] = b"Q\0\0\0\x0bCOMMIT\0";

/// Where the servers are, too.
const LOOPBACK: &str = "127.0.0.1";

#[derive(Default)]
struct Faults {
    delay_ms: AtomicU64,
    /// Bytes from the server are held back, the connection stays.
    mute: AtomicBool,
    /// Bytes from the client are held back, the connection stays.
    deaf: AtomicBool,
    /// New connections are closed at once.
    refuse: AtomicBool,
    /// A COMMIT from the client is held back, with all that follows on its connection.
    hold_commits: AtomicBool,
}

/// In front of one server. Brokers of Kafka tell clients where they are: that is changed to here, for URLs
/// of the scheme `kafka`.
pub struct Proxy {
    address: &'static str,
    port: u16,
    faults: Arc<Faults>,
    cut: watch::Sender<u64>,
}

impl Proxy {
    /// In front of the server that this URL names.
    pub async fn new(url: &str) -> Self {
        Self::at(LOOPBACK, url).await
    }

    /// At this address of the loopback network.
    pub async fn at(address: &'static str, url: &str) -> Self {
        let target = url::Url::parse(url).unwrap();
        let host = target.host_str().unwrap().to_owned();
        let port = target.port().unwrap_or(match target.scheme() {
            "nats" => 4222,
            "kafka" => 9092,
            scheme if scheme.starts_with("amqp") => 5672,
            _ => 5432,
        });
        let listener = TcpListener::bind((address, 0)).await.unwrap();
        let faults = Arc::new(Faults::default());
        let (cut, cuts) = watch::channel(0);
        let own_port = listener.local_addr().unwrap().port();
        let redirect = (target.scheme() == "kafka").then(|| Redirect {
            from: [host.as_bytes(), &u32::from(port).to_be_bytes()].concat(),
            to: [host.as_bytes(), &u32::from(own_port).to_be_bytes()].concat(),
        });
        let proxy = Self {
            address,
            port: own_port,
            faults: faults.clone(),
            cut,
        };
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                if faults.refuse.load(Ordering::Relaxed) {
                    continue;
                }
                let (host, faults, cuts) = (host.clone(), faults.clone(), cuts.clone());
                let redirect = redirect.clone();
                tokio::spawn(async move {
                    if let Ok(server) = TcpStream::connect((host.as_str(), port)).await {
                        carry(client, server, (faults, redirect), cuts).await;
                    }
                });
            }
        });
        proxy
    }

    /// The same URL, through this proxy.
    pub fn through(&self, url: &str) -> String {
        let mut url = url::Url::parse(url).unwrap();
        url.set_host(Some(self.address)).unwrap();
        url.set_port(Some(self.port)).unwrap();
        url.to_string()
    }

    /// Delays every piece from the server by this.
    pub fn delay(&self, delay: Duration) {
        self.faults
            .delay_ms
            .store(u64::try_from(delay.as_millis()).unwrap(), Ordering::Relaxed);
    }

    /// Holds back what the server says; the connections stay.
    pub fn mute(&self, mute: bool) {
        self.faults.mute.store(mute, Ordering::Relaxed);
    }

    /// Holds back what the client says; the connections stay.
    pub fn deafen(&self, deaf: bool) {
        self.faults.deaf.store(deaf, Ordering::Relaxed);
    }

    /// Closes new connections at once.
    pub fn refuse(&self, refuse: bool) {
        self.faults.refuse.store(refuse, Ordering::Relaxed);
    }

    /// Holds back each COMMIT, with all that follows on its connection: what was sent before it in the
    /// same packet goes through, and the transaction stays open.
    pub fn hold_commits(&self, hold: bool) {
        self.faults.hold_commits.store(hold, Ordering::Relaxed);
    }

    /// Cuts every connection.
    pub fn cut(&self) {
        self.cut.send_modify(|cuts| *cuts += 1);
    }
}

async fn carry(
    client: TcpStream,
    server: TcpStream,
    (faults, redirect): (Arc<Faults>, Option<Redirect>),
    mut cuts: watch::Receiver<u64>,
) {
    cuts.mark_unchanged();
    client.set_nodelay(true).ok();
    server.set_nodelay(true).ok();
    let (mut from_client, mut to_client) = client.into_split();
    let (mut from_server, mut to_server) = server.into_split();
    let upward = async {
        let mut piece = vec![0; 65_536];
        loop {
            match from_client.read(&mut piece).await {
                Ok(0) | Err(_) => return,
                Ok(read) => {
                    hold(|| faults.deaf.load(Ordering::Relaxed)).await;
                    let piece = &piece[..read];
                    let commit = piece
                        .windows(COMMIT.len())
                        .position(|bytes| bytes == COMMIT);
                    let (now, later) = piece.split_at(commit.unwrap_or(read));
                    if to_server.write_all(now).await.is_err() {
                        return;
                    }
                    if !later.is_empty() {
                        hold(|| faults.hold_commits.load(Ordering::Relaxed)).await;
                    }
                    if to_server.write_all(later).await.is_err() {
                        return;
                    }
                }
            }
        }
    };
    let downward = async {
        let mut piece = vec![0; 65_536];
        let mut frames = Frames::default();
        loop {
            match from_server.read(&mut piece).await {
                Ok(0) | Err(_) => return,
                Ok(read) => {
                    let delay = faults.delay_ms.load(Ordering::Relaxed);
                    if delay > 0 {
                        tokio::time::sleep(Duration::from_millis(delay)).await;
                    }
                    hold(|| faults.mute.load(Ordering::Relaxed)).await;
                    let written = match &redirect {
                        None => to_client.write_all(&piece[..read]).await,
                        Some(redirect) => {
                            let whole = frames.take(&piece[..read], redirect);
                            to_client.write_all(&whole).await
                        }
                    };
                    if written.is_err() {
                        return;
                    }
                }
            }
        }
    };
    tokio::select! {
        () = upward => {}
        () = downward => {}
        _ = cuts.changed() => {}
    }
}

/// What a broker says of where it is, and what it shall say: host and port, as in its answers.
#[derive(Clone)]
struct Redirect {
    from: Vec<u8>,
    to: Vec<u8>,
}

/// Answers of a broker of Kafka, which have their length before them, put together again.
#[derive(Default)]
struct Frames(Vec<u8>);

impl Frames {
    /// All that is whole now, redirected.
    fn take(&mut self, piece: &[u8], redirect: &Redirect) -> Vec<u8> {
        self.0.extend_from_slice(piece);
        let mut end = 0;
        while let Some(length) = self.0.get(end..end + 4) {
            let length = u32::from_be_bytes(length.try_into().unwrap()) as usize;
            if self.0.len() < end + 4 + length {
                break;
            }
            end += 4 + length;
        }
        let later = self.0.split_off(end);
        let mut whole = std::mem::replace(&mut self.0, later);
        let mut at = 0;
        while let Some(found) = whole[at..]
            .windows(redirect.from.len())
            .position(|bytes| bytes == redirect.from)
        {
            at += found;
            whole[at..at + redirect.to.len()].copy_from_slice(&redirect.to);
        }
        whole
    }
}

async fn hold(held: impl Fn() -> bool) {
    while held() {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}
