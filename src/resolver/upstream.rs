//! The exchange with the upstream servers: each query has a new random number and a new socket, so
//! a new port, and only what comes from the server's address is read.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use rustix::rand::{GetRandomFlags, getrandom};
use tokio::net::{TcpStream, UdpSocket};
use tokio::time::timeout;

use super::message::{LARGEST_DATAGRAM, NoAnswer, Question, UpstreamAnswer};
use super::stream::{read_message, write_message};

/// How often all servers are asked, one after the other.
const ROUNDS: usize = 2;

/// The servers that answer the questions of containers, in the order in which they are asked.
#[derive(Debug, Clone)]
pub struct Upstreams {
    servers: Vec<SocketAddr>,
    patience: Patience,
}

/// How long a server is waited for.
#[derive(Debug, Clone, Copy)]
struct Patience {
    datagram: Duration,
    connection: Duration,
    /// Over TCP: the connection, the query and the answer.
    stream: Duration,
}

const PATIENCE: Patience = Patience {
    datagram: Duration::from_secs(2),
    connection: Duration::from_secs(2),
    stream: Duration::from_secs(4),
};

impl Upstreams {
    pub fn new(servers: Vec<SocketAddr>) -> Upstreams {
        Upstreams { servers, patience: PATIENCE }
    }

    /// Asks the servers until one answers. The error says what each server did at last.
    pub async fn resolve(&self, question: &Question) -> Result<UpstreamAnswer, String> {
        if self.servers.is_empty() {
            return Err("no upstream server is known".to_string());
        }
        let mut reasons = Vec::new();
        for _ in 0..ROUNDS {
            reasons.clear();
            for server in &self.servers {
                match self.ask(*server, question).await {
                    Ok(answer) => return Ok(answer),
                    Err(reason) => reasons.push(format!("{server}: {reason}")),
                }
            }
        }
        Err(format!("ask for \"{}\": {}", question.name, reasons.join("; ")))
    }

    /// Asks one server, over TCP as well if the answer is too large for a datagram.
    async fn ask(&self, server: SocketAddr, question: &Question) -> Result<UpstreamAnswer, String> {
        let patience = self.patience;
        let mut answer = within(patience.datagram, ask_by_datagram(server, question)).await;
        if let Err(NoAnswer::Truncated) = answer {
            let over_tcp = ask_by_stream(server, question, patience.connection);
            answer = within(patience.stream, over_tcp).await;
        }
        answer.map_err(|reason| reason.to_string())
    }
}

async fn within(
    patience: Duration,
    answer: impl Future<Output = Result<UpstreamAnswer, NoAnswer>>,
) -> Result<UpstreamAnswer, NoAnswer> {
    match timeout(patience, answer).await {
        Ok(answer) => answer,
        Err(_) => Err(NoAnswer::Unusable(format!("no answer within {patience:?}"))),
    }
}

/// One query over UDP. Waits on while other messages come.
async fn ask_by_datagram(
    server: SocketAddr,
    question: &Question,
) -> Result<UpstreamAnswer, NoAnswer> {
    let any_port = match server {
        SocketAddr::V4(_) => SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0)),
        SocketAddr::V6(_) => SocketAddr::from((Ipv6Addr::UNSPECIFIED, 0)),
    };
    let id = random_id()?;
    let socket = UdpSocket::bind(any_port).await?;
    // Connected: the kernel drops what comes from elsewhere, and reports a closed port.
    socket.connect(server).await?;
    socket.send(&question.upstream_query(id)).await?;
    let mut buffer = vec![0; usize::from(LARGEST_DATAGRAM)];
    loop {
        let length = socket.recv(&mut buffer).await?;
        match question.read_answer(id, &buffer[..length]) {
            Err(NoAnswer::Foreign) => {}
            answer => return answer,
        }
    }
}

/// One query over TCP (RFC 7766), on a connection of its own.
async fn ask_by_stream(
    server: SocketAddr,
    question: &Question,
    patience: Duration,
) -> Result<UpstreamAnswer, NoAnswer> {
    let id = random_id()?;
    let Ok(stream) = timeout(patience, TcpStream::connect(server)).await else {
        return Err(NoAnswer::Unusable(format!("no TCP connection within {patience:?}")));
    };
    let stream = stream?;
    write_message(&stream, &question.upstream_query(id)).await?;
    let answer = read_message(&stream, usize::from(u16::MAX)).await?;
    question.read_answer(id, &answer)
}

/// A number that nobody can predict, because whoever knows it and the port can answer.
fn random_id() -> Result<u16, NoAnswer> {
    let mut bytes = [0; 2];
    // So few bytes are never delivered in part.
    getrandom(&mut bytes, GetRandomFlags::empty()).map_err(io::Error::from)?;
    Ok(u16::from_ne_bytes(bytes))
}

impl From<io::Error> for NoAnswer {
    fn from(error: io::Error) -> NoAnswer {
        NoAnswer::Unusable(error.to_string())
    }
}

#[cfg(test)]
mod tests;
