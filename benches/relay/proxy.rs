//! A TCP proxy that delays what a server says, and counts the statements that a client of PostgreSQL sends.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until};
use url::Url;

/// What is read at once.
const PIECE: usize = 65_536;
/// Pieces under way: the server may be ahead of the client by as many.
const UNDER_WAY: usize = 1_024;

/// In front of one server, until the bench ends.
pub(crate) struct Proxy {
    url: Url,
    statements: Arc<AtomicU64>,
}

impl Proxy {
    /// In front of the server of this URL. All that the server says comes later by `delay`; a long answer is
    /// as far apart as it was sent.
    pub(crate) async fn new(url: &str, delay: Duration) -> Self {
        let mut url = Url::parse(url).expect("a URL");
        let server = (
            url.host_str().expect("a host").to_owned(),
            url.port().unwrap_or(default_port(&url)),
        );
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.expect("a port");
        let bound = listener.local_addr().expect("it is bound");
        url.set_host(Some("127.0.0.1")).expect("URLs have hosts");
        url.set_port(Some(bound.port())).expect("URLs have ports");
        let statements = Arc::new(AtomicU64::new(0));
        let counter = statements.clone();
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let (server, counter) = (server.clone(), counter.clone());
                tokio::spawn(async move {
                    if let Ok(server) = TcpStream::connect(server).await {
                        carry(client, server, delay, &counter).await;
                    }
                });
            }
        });
        Self { url, statements }
    }

    /// The server's URL through this proxy.
    pub(crate) fn url(&self) -> Url {
        self.url.clone()
    }

    /// Statements so far, if the server is PostgreSQL and clients talk to it in the clear.
    pub(crate) fn statements(&self) -> u64 {
        self.statements.load(Ordering::Relaxed)
    }
}

fn default_port(url: &Url) -> u16 {
    if url.scheme().starts_with("amqp") {
        5672
    } else {
        5432
    }
}

async fn carry(client: TcpStream, server: TcpStream, delay: Duration, statements: &AtomicU64) {
    for stream in [&client, &server] {
        // Slower, but no less right.
        stream.set_nodelay(true).ok();
    }
    let (from_client, to_client) = client.into_split();
    let (from_server, to_server) = server.into_split();
    tokio::select! {
        () = upward(from_client, to_server, statements) => {}
        () = downward(from_server, to_client, delay) => {}
    }
}

async fn upward(mut from: OwnedReadHalf, mut to: OwnedWriteHalf, statements: &AtomicU64) {
    let mut frontend = Frontend::default();
    let mut piece = vec![0; PIECE];
    while let Ok(read @ 1..) = from.read(&mut piece).await {
        let sent = frontend.statements(&piece[..read]);
        statements.fetch_add(sent, Ordering::Relaxed);
        if to.write_all(&piece[..read]).await.is_err() {
            return;
        }
    }
}

/// Reads on while pieces wait for their time, so that it delays and does not throttle.
async fn downward(mut from: OwnedReadHalf, mut to: OwnedWriteHalf, delay: Duration) {
    let (hand_on, mut pieces) = mpsc::channel::<(Instant, Vec<u8>)>(UNDER_WAY);
    let reading = async move {
        let mut piece = vec![0; PIECE];
        while let Ok(read @ 1..) = from.read(&mut piece).await {
            let due = Instant::now() + delay;
            if hand_on.send((due, piece[..read].to_vec())).await.is_err() {
                return;
            }
        }
    };
    let writing = async move {
        while let Some((due, piece)) = pieces.recv().await {
            sleep_until(due).await;
            if to.write_all(&piece).await.is_err() {
                return;
            }
        }
    };
    futures_util::join!(reading, writing);
}

/// What a client of PostgreSQL says, message by message.
#[derive(Default)]
struct Frontend {
    unread: Vec<u8>,
    started: bool,
}

impl Frontend {
    /// Statements that these bytes complete.
    fn statements(&mut self, bytes: &[u8]) -> u64 {
        self.unread.extend_from_slice(bytes);
        let mut statements = 0;
        while let Some(message) = self.next_message() {
            statements += match message.first() {
                Some(b'E') => 1,
                // Several, perhaps, in one text.
                Some(b'Q') => texts(&message[5..]),
                _ => 0,
            };
        }
        statements
    }

    /// A message is its type, its length without the type, and that; the first one has no type.
    fn next_message(&mut self) -> Option<Vec<u8>> {
        let start = usize::from(self.started);
        let length = self.unread.get(start..start + 4)?;
        let length = u32::from_be_bytes(length.try_into().ok()?) as usize;
        if self.unread.len() < start + length {
            return None;
        }
        let message: Vec<u8> = self.unread.drain(..start + length).collect();
        if self.started {
            Some(message)
        } else {
            self.started = true;
            Some(Vec::new())
        }
    }
}

fn texts(query: &[u8]) -> u64 {
    let pieces = query.split(|byte| *byte == b';');
    let has_text = |piece: &&[u8]| piece.iter().any(u8::is_ascii_alphanumeric);
    pieces.filter(has_text).count() as u64
}
