//! An HTTP server of a few lines in the place of an object store.

use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener};
use std::sync::{Arc, Mutex};
use std::thread;

/// Answers each request with what a function makes of its first line, and remembers what it was asked. It lives as long as the process.
pub struct FakeStore {
    address: SocketAddr,
    heads: Arc<Mutex<Vec<String>>>,
}

impl FakeStore {
    /// Starts one. What `answer` returns is sent as it is, and a connection ends with it.
    pub fn start(answer: impl Fn(&str) -> Vec<u8> + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (address, heads) = (listener.local_addr().unwrap(), Arc::new(Mutex::new(Vec::new())));
        let (asked, answer) = (heads.clone(), Arc::new(answer));
        thread::spawn(move || {
            for connection in listener.incoming() {
                let (mut connection, asked, answer) = (connection.unwrap(), asked.clone(), answer.clone());
                thread::spawn(move || {
                    let lines = BufReader::new(&connection).lines().map_while(Result::ok);
                    let lines: Vec<String> = lines.take_while(|line| !line.is_empty()).collect();
                    let Some(first) = lines.first() else { return };
                    asked.lock().unwrap().push(lines.join("\n"));
                    // A client that has heard enough hangs up.
                    let _ = connection.write_all(&answer(first));
                });
            }
        });
        FakeStore { address, heads }
    }

    /// One that has the same object everywhere.
    pub fn of(object: &'static [u8]) -> Self {
        Self::start(|_| answer("200 OK", object))
    }

    /// Where it is, without a slash.
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Requests it has had: first lines and headers.
    pub fn heads(&self) -> Vec<String> {
        self.heads.lock().unwrap().clone()
    }
}

/// A whole answer.
pub fn answer(status: &str, body: &[u8]) -> Vec<u8> {
    let head = format!("HTTP/1.1 {status}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n", body.len());
    [head.as_bytes(), body].concat()
}
