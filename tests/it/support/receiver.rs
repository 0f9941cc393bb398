//! An HTTP server that answers by script: what alerts are sent to.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

/// What becomes of one request.
#[derive(Clone, Debug)]
pub enum Reply {
    /// 200.
    Taken,
    /// Status line, further header lines, body.
    Refused(&'static str, &'static str, &'static str),
    /// No answer, for as long as the client waits.
    Hang,
    /// 200, but only after [`Receiver::release`].
    Hold,
    /// The connection is closed without an answer.
    Close,
}

/// One request, as it came.
#[derive(Clone, Debug)]
pub struct Request {
    pub at: Instant,
    pub head: String,
    pub body: serde_json::Value,
    pub taken: bool,
}

/// Listens on a loopback port. Once the script is at its end every request is taken.
pub struct Receiver {
    pub port: u16,
    requests: Arc<Mutex<Vec<Request>>>,
    released: watch::Sender<bool>,
}

impl Receiver {
    pub async fn new(script: impl IntoIterator<Item = Reply>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let requests = Arc::new(Mutex::new(Vec::new()));
        let (released, releases) = watch::channel(false);
        let mut script: VecDeque<_> = script.into_iter().collect();
        let seen = requests.clone();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let reply = script.pop_front().unwrap_or(Reply::Taken);
                tokio::spawn(answer(stream, reply, seen.clone(), releases.clone()));
            }
        });
        Self {
            port,
            requests,
            released,
        }
    }

    pub fn url(&self, path: &str) -> String {
        format!("http://127.0.0.1:{}{path}", self.port)
    }

    /// Answers what is held.
    pub fn release(&self) {
        self.released.send_replace(true);
    }

    pub fn requests(&self) -> Vec<Request> {
        self.requests.lock().unwrap().clone()
    }

    /// Bodies of the requests that were answered with 200.
    pub fn taken(&self) -> Vec<serde_json::Value> {
        let requests = self.requests();
        let taken = requests.into_iter().filter(|request| request.taken);
        taken.map(|request| request.body).collect()
    }

    /// Forgets the requests that came so far.
    pub fn forget(&self) {
        self.requests.lock().unwrap().clear();
    }

    /// Waits until so many requests came.
    pub async fn until_requests(&self, count: usize, within: Duration) {
        let began = Instant::now();
        while self.requests().len() < count {
            assert!(
                began.elapsed() < within,
                "not {count} requests within {within:?}: {:#?}",
                self.requests()
            );
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

async fn answer(
    mut stream: TcpStream,
    reply: Reply,
    seen: Arc<Mutex<Vec<Request>>>,
    mut releases: watch::Receiver<bool>,
) {
    let Some((head, body)) = read(&mut stream).await else {
        return;
    };
    seen.lock().unwrap().push(Request {
        at: Instant::now(),
        head,
        body,
        taken: matches!(reply, Reply::Taken | Reply::Hold),
    });
    let (status, headers, text) = match reply {
        Reply::Close => return,
        Reply::Hang => {
            // Ends when the client closes.
            stream.read_to_end(&mut Vec::new()).await.ok();
            return;
        }
        Reply::Hold => {
            releases.wait_for(|released| *released).await.ok();
            ("200 OK", "", "ok")
        }
        Reply::Taken => ("200 OK", "", "ok"),
        Reply::Refused(status, headers, text) => (status, headers, text),
    };
    let length = text.len();
    let answer = format!(
        "HTTP/1.1 {status}\r\n{headers}Content-Length: {length}\r\nConnection: close\r\n\r\n{text}"
    );
    stream.write_all(answer.as_bytes()).await.ok();
}

/// Head and body of one request; none when the client gave up meanwhile.
async fn read(stream: &mut TcpStream) -> Option<(String, serde_json::Value)> {
    let mut bytes = Vec::new();
    loop {
        if let Some(end) = bytes.windows(4).position(|four| four == b"\r\n\r\n") {
            let head = String::from_utf8(bytes[..end].to_vec()).unwrap();
            let length = head
                .lines()
                .filter_map(|line| line.split_once(':'))
                .find(|(name, _)| name.eq_ignore_ascii_case("content-length"))
                .map(|(_, length)| length.trim().parse::<usize>().unwrap())?;
            if bytes.len() - end - 4 >= length {
                let body = serde_json::from_slice(&bytes[end + 4..]).unwrap();
                return Some((head, body));
            }
        }
        if stream.read_buf(&mut bytes).await.ok()? == 0 {
            return None;
        }
    }
}
