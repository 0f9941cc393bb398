//! A NATS server that does what no real one can be asked for: it acknowledges some events and never
//! says a word of others.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::tcp::OwnedWriteHalf;
use tokio::net::{TcpListener, TcpStream};

const INFO: &str = "INFO {\"server_id\":\"fake\",\"server_name\":\"fake\",\"version\":\"2.9.10\",\"proto\":1,\
                    \"host\":\"127.0.0.1\",\"port\":4222,\"headers\":true,\"max_payload\":1048576}\r\n";

/// Takes everything below `events.` as the stream EVENTS would.
pub struct FakeNats {
    pub url: String,
    connections: Arc<AtomicUsize>,
}

impl FakeNats {
    /// One that is silent about the events whose `event_sequence` this says.
    pub async fn silent_about(silent: impl Fn(u64) -> bool + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let url = format!("nats://{}", listener.local_addr().unwrap());
        let connections = Arc::new(AtomicUsize::new(0));
        let (counter, silent) = (connections.clone(), Arc::new(silent));
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                counter.fetch_add(1, Ordering::Relaxed);
                let silent = silent.clone();
                tokio::spawn(async move { serve(client, &*silent).await });
            }
        });
        Self { url, connections }
    }

    /// How many there have been.
    pub fn connections(&self) -> usize {
        self.connections.load(Ordering::Relaxed)
    }
}

struct Session {
    to_client: OwnedWriteHalf,
    /// Begin of the subjects, and the number.
    subscriptions: Vec<(String, String)>,
    sequence: u64,
}

impl Session {
    async fn say(&mut self, text: &str) -> Option<()> {
        self.to_client.write_all(text.as_bytes()).await.ok()
    }

    async fn reply(&mut self, to: &str, body: &str) -> Option<()> {
        let heard = |(begin, _): &&(String, String)| to.starts_with(begin.as_str());
        let (_, number) = self.subscriptions.iter().find(heard)?.clone();
        let text = format!("MSG {to} {number} {}\r\n{body}\r\n", body.len());
        self.say(&text).await
    }
}

async fn serve(client: TcpStream, silent: &(dyn Fn(u64) -> bool + Send + Sync)) -> Option<()> {
    let (from_client, to_client) = client.into_split();
    let mut lines = BufReader::new(from_client);
    let mut session = Session {
        to_client,
        subscriptions: Vec::new(),
        sequence: 0,
    };
    session.say(INFO).await?;
    loop {
        let mut line = String::new();
        if lines.read_line(&mut line).await.ok()? == 0 {
            return None;
        }
        let words: Vec<_> = line.split_whitespace().collect();
        match words.as_slice() {
            ["PING"] => session.say("PONG\r\n").await?,
            ["SUB", subject, .., number] => {
                let begin = subject.trim_end_matches(['*', '>']).to_owned();
                session.subscriptions.push((begin, (*number).to_owned()));
            }
            ["PUB" | "HPUB", subject, reply, .., size] => {
                let (subject, reply) = ((*subject).to_owned(), (*reply).to_owned());
                let mut body = vec![0; size.parse::<usize>().unwrap() + 2];
                lines.read_exact(&mut body).await.ok()?;
                answer(&mut session, &subject, &reply, &body, silent).await?;
            }
            _ => {}
        }
    }
}

async fn answer(
    session: &mut Session,
    subject: &str,
    reply: &str,
    body: &[u8],
    silent: &(dyn Fn(u64) -> bool + Send + Sync),
) -> Option<()> {
    if subject.starts_with("$JS.API.STREAM.INFO.") {
        let info = r#"{"config":{"subjects":["events.>"],"duplicate_window":120000000000}}"#;
        return session.reply(reply, info).await;
    }
    if subject.starts_with("$JS.API.") {
        return session.reply(reply, "{}").await;
    }
    let text = String::from_utf8_lossy(body);
    let id = text
        .split("event_sequence: ")
        .nth(1)?
        .split("\r\n")
        .next()?;
    if silent(id.parse().unwrap()) {
        return Some(());
    }
    session.sequence += 1;
    let kept = format!(r#"{{"stream":"EVENTS","seq":{}}}"#, session.sequence);
    session.reply(reply, &kept).await
}
