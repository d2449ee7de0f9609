//! Messages over TCP, each with its length in front (RFC 1035, section 4.2.2).

use std::io;

use tokio::io::Interest;
use tokio::net::TcpStream;

/// Reads a message of at most `most` bytes. A longer one is an error.
pub async fn read_message(stream: &TcpStream, most: usize) -> io::Result<Vec<u8>> {
    let mut length = [0; 2];
    read_exactly(stream, &mut length).await?;
    let length = usize::from(u16::from_be_bytes(length));
    if length > most {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut message = vec![0; length];
    read_exactly(stream, &mut message).await?;
    Ok(message)
}

async fn read_exactly(stream: &TcpStream, mut room: &mut [u8]) -> io::Result<()> {
    while !room.is_empty() {
        let length = stream.async_io(Interest::READABLE, || stream.try_read(room)).await?;
        if length == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        room = &mut room[length..];
    }
    Ok(())
}

pub async fn write_message(stream: &TcpStream, message: &[u8]) -> io::Result<()> {
    let length = u16::try_from(message.len()).map_err(io::Error::other)?;
    let bytes = [&length.to_be_bytes(), message].concat();
    let mut rest = bytes.as_slice();
    while !rest.is_empty() {
        let sent = stream.async_io(Interest::WRITABLE, || stream.try_write(rest)).await?;
        rest = &rest[sent..];
    }
    Ok(())
}
