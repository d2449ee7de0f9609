//! Messages of the domain name system as tests write and read them (RFC 1035), without any code of
//! the program under test.

use std::net::IpAddr;

pub(super) const A: u16 = 1;
pub(super) const CNAME: u16 = 5;
pub(super) const MX: u16 = 15;
pub(super) const TXT: u16 = 16;
pub(super) const AAAA: u16 = 28;
pub(super) const OPT: u16 = 41;
pub(super) const SVCB: u16 = 64;
pub(super) const HTTPS: u16 = 65;
pub(super) const ANY: u16 = 255;

pub(super) const IN: u16 = 1;
pub(super) const CH: u16 = 3;

pub(super) const NOERROR: u16 = 0;
pub(super) const SERVFAIL: u16 = 2;
pub(super) const NXDOMAIN: u16 = 3;
pub(super) const REFUSED: u16 = 5;

/// Flags of the header.
pub(super) const RESPONSE: u16 = 0x8000;
pub(super) const TRUNCATED: u16 = 0x0200;
pub(super) const RECURSION_DESIRED: u16 = 0x0100;
const RECURSION_AVAILABLE: u16 = 0x0080;

/// A parameter of SVCB: its number and value.
pub(super) type Parameter<'p> = (u16, &'p [u8]);

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Record {
    pub(super) name: String,
    pub(super) kind: u16,
    pub(super) class: u16,
    pub(super) ttl: u32,
    pub(super) data: Vec<u8>,
}

impl Record {
    fn new(name: &str, kind: u16, data: Vec<u8>) -> Record {
        Record { name: name.to_owned(), kind, class: IN, ttl: 300, data }
    }

    /// The address of a name, of type A or AAAA.
    pub(super) fn address(name: &str, ip: &str) -> Record {
        match ip.parse().unwrap() {
            IpAddr::V4(ip) => Record::new(name, A, ip.octets().to_vec()),
            IpAddr::V6(ip) => Record::new(name, AAAA, ip.octets().to_vec()),
        }
    }

    pub(super) fn cname(name: &str, target: &str) -> Record {
        Record::new(name, CNAME, encoded_name(target))
    }

    /// A record of SVCB or HTTPS with priority 1.
    pub(super) fn service(name: &str, kind: u16, target: &str, params: &[Parameter<'_>]) -> Record {
        let mut data = [&[0, 1], &encoded_name(target)[..]].concat();
        for (number, value) in params {
            data.extend(number.to_be_bytes());
            data.extend(u16::try_from(value.len()).unwrap().to_be_bytes());
            data.extend(*value);
        }
        Record::new(name, kind, data)
    }

    pub(super) fn text(name: &str, text: &str) -> Record {
        let length = [u8::try_from(text.len()).unwrap()];
        Record::new(name, TXT, [&length, text.as_bytes()].concat())
    }

    pub(super) fn with_ttl(self, ttl: u32) -> Record {
        Record { ttl, ..self }
    }

    /// The address in a record of type A or AAAA.
    pub(super) fn ip(&self) -> Option<IpAddr> {
        match self.kind {
            A => <[u8; 4]>::try_from(self.data.as_slice()).ok().map(IpAddr::from),
            AAAA => <[u8; 16]>::try_from(self.data.as_slice()).ok().map(IpAddr::from),
            _ => None,
        }
    }

    /// Writes the record; a name that is the one in the question as a pointer to it.
    fn write_to(&self, message: &mut Vec<u8>, questions: &[(String, u16, u16)]) {
        if questions.first().is_some_and(|question| question.0 == self.name) {
            message.extend([0xc0, 12]);
        } else {
            message.extend(encoded_name(&self.name));
        }
        message.extend(self.kind.to_be_bytes());
        message.extend(self.class.to_be_bytes());
        message.extend(self.ttl.to_be_bytes());
        message.extend(u16::try_from(self.data.len()).unwrap().to_be_bytes());
        message.extend(&self.data);
    }
}

/// A parsed message.
#[derive(Clone, Debug)]
pub(super) struct Message {
    pub(super) id: u16,
    pub(super) flags: u16,
    /// The names with type and class, as they are spelled.
    pub(super) questions: Vec<(String, u16, u16)>,
    pub(super) answers: Vec<Record>,
    pub(super) authority: Vec<Record>,
    pub(super) additional: Vec<Record>,
}

impl Message {
    /// A question for a name of class IN, with RD.
    pub(super) fn question(name: &str, kind: u16) -> Message {
        static NEXT: std::sync::atomic::AtomicU16 = std::sync::atomic::AtomicU16::new(1);
        Message {
            id: NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed),
            flags: RECURSION_DESIRED,
            questions: vec![(name.to_owned(), kind, IN)],
            answers: Vec::new(),
            authority: Vec::new(),
            additional: Vec::new(),
        }
    }

    /// The same question with EDNS and this size of UDP messages.
    pub(super) fn with_edns(mut self, size: u16, options: &[u8]) -> Message {
        let opt = Record::new("", OPT, options.to_vec());
        self.additional.push(Record { class: size, ttl: 0, ..opt });
        self
    }

    /// The answer of a server to this question.
    pub(super) fn reply(&self, rcode: u16, answers: Vec<Record>) -> Message {
        let flags = RESPONSE | RECURSION_DESIRED | RECURSION_AVAILABLE | rcode;
        let questions = self.questions.clone();
        let (authority, additional) = (Vec::new(), Vec::new());
        Message { id: self.id, flags, questions, answers, authority, additional }
    }

    pub(super) fn rcode(&self) -> u16 {
        self.flags & 0xf
    }

    pub(super) fn is_truncated(&self) -> bool {
        self.flags & TRUNCATED != 0
    }

    /// The addresses in the answer, sorted.
    pub(super) fn ips(&self) -> Vec<IpAddr> {
        let mut ips: Vec<IpAddr> = self.answers.iter().filter_map(Record::ip).collect();
        ips.sort_unstable();
        ips
    }

    pub(super) fn encode(&self) -> Vec<u8> {
        let sections = [&self.answers, &self.authority, &self.additional];
        let mut message = [self.id, self.flags].map(u16::to_be_bytes).concat();
        let count = |length: usize| u16::try_from(length).unwrap().to_be_bytes();
        message.extend(count(self.questions.len()));
        message.extend(sections.map(|section| count(section.len())).concat());
        for (name, kind, class) in &self.questions {
            message.extend(encoded_name(name));
            message.extend([kind, class].map(|number| number.to_be_bytes()).concat());
        }
        for record in sections.into_iter().flatten() {
            record.write_to(&mut message, &self.questions);
        }
        message
    }

    /// Reads a message, with compressed names; `None` if it is malformed.
    pub(super) fn decode(bytes: &[u8]) -> Option<Message> {
        let mut reader = Reader { bytes, at: 0 };
        let (id, flags) = (reader.number()?, reader.number()?);
        let counts = [reader.number()?, reader.number()?, reader.number()?, reader.number()?];
        let mut questions = Vec::new();
        for _ in 0..counts[0] {
            questions.push((reader.name()?, reader.number()?, reader.number()?));
        }
        let mut records = |count| (0..count).map(|_| reader.record()).collect::<Option<Vec<_>>>();
        let (answers, authority) = (records(counts[1])?, records(counts[2])?);
        let additional = records(counts[3])?;
        Some(Message { id, flags, questions, answers, authority, additional })
    }
}

struct Reader<'m> {
    bytes: &'m [u8],
    at: usize,
}

impl<'m> Reader<'m> {
    fn take(&mut self, length: usize) -> Option<&'m [u8]> {
        let taken = self.bytes.get(self.at..self.at + length)?;
        self.at += length;
        Some(taken)
    }

    fn number(&mut self) -> Option<u16> {
        Some(u16::from_be_bytes(self.take(2)?.try_into().unwrap()))
    }

    fn name(&mut self) -> Option<String> {
        let (mut labels, mut end) = (Vec::new(), None);
        loop {
            match self.take(1)?[0] {
                0 => break,
                length @ 1..64 => {
                    let label = self.take(length.into())?;
                    labels.push(String::from_utf8_lossy(label).into_owned());
                }
                high => {
                    let low = self.take(1)?[0];
                    end = end.or(Some(self.at));
                    self.at = usize::from(high & 0x3f) << 8 | usize::from(low);
                    if labels.len() > 128 {
                        return None;
                    }
                }
            }
        }
        self.at = end.unwrap_or(self.at);
        Some(labels.join("."))
    }

    fn record(&mut self) -> Option<Record> {
        let (name, kind, class) = (self.name()?, self.number()?, self.number()?);
        let ttl = u32::from_be_bytes(self.take(4)?.try_into().unwrap());
        let length = usize::from(self.number()?);
        let end = self.at + length;
        // The only compressed name that tests read is the target of a CNAME.
        let data = match kind {
            CNAME => encoded_name(&self.name()?),
            _ => self.take(length)?.to_vec(),
        };
        self.at = end;
        Some(Record { name, kind, class, ttl, data })
    }
}

/// A name as labels with their lengths, without compression.
pub(super) fn encoded_name(name: &str) -> Vec<u8> {
    let mut bytes = Vec::new();
    for label in name.split('.').filter(|label| !label.is_empty()) {
        bytes.push(u8::try_from(label.len()).unwrap());
        bytes.extend(label.as_bytes());
    }
    bytes.push(0);
    bytes
}
