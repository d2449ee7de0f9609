//! The command line of the resolver.

use std::net::SocketAddr;

use super::servers::parse_server;
use crate::options::{
    self, CommandLine, CommandOption, ParsedCommandLine, long_option, require_no_words, usage_error,
};
use cni::error::Result;

const UPSTREAM: &str = "--upstream";

const OPTIONS: &[CommandOption] = &[long_option(
    UPSTREAM,
    "ADDRESS",
    "a server that answers queries, with :PORT if that is not 53; may be repeated. Without it: those\nof /run/systemd/resolve/resolv.conf, or of /etc/resolv.conf",
)];

pub fn help_text() -> String {
    let options = options::help_text(OPTIONS);
    format!(
        "\
resolver: answers the queries of containers whose egress policies have names

Usage:
  cnibox egress resolver [--upstream ADDRESS[:PORT]]...

Serves port 533 of the node, to which rules of policies redirect the queries of containers, until \
         SIGTERM or SIGINT.
The addresses in answers are put in force before the answers are sent.

Options:
{options}
Exit status: 0 stopped; 1 failed, see stderr; 2 wrong usage.
"
    )
}

/// Parses the arguments after `resolver`.
pub fn parse_arguments(args: Vec<String>) -> Result<ParsedCommandLine> {
    options::parse_args(args, OPTIONS)
}

/// The servers of the command line.
pub fn upstream_servers(line: &CommandLine) -> Result<Vec<SocketAddr>> {
    require_no_words(line)?;
    let server = |text| {
        parse_server(text).ok_or_else(|| {
            usage_error(format!("invalid server \"{text}\" of {UPSTREAM}"))
                .with_details("write it like 192.0.2.1, 192.0.2.1:53 or [2001:db8::1]:53")
        })
    };
    line.all_values(UPSTREAM).map(server).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(line: &str) -> Result<Vec<SocketAddr>> {
        match parse_arguments(line.split_whitespace().map(str::to_owned).collect())? {
            ParsedCommandLine::Work(line) => upstream_servers(&line),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn servers_are_read_in_order() {
        let servers = read("--upstream 192.0.2.1 --upstream=[2001:db8::1]:5353").unwrap();
        let expected = ["192.0.2.1:53", "[2001:db8::1]:5353"].map(|text| text.parse().unwrap());
        assert_eq!(servers, expected);
        assert_eq!(read(""), Ok(Vec::new()));
    }

    #[test]
    fn wrong_command_lines_are_refused() {
        for (line, message) in [
            ("--upstream dns.example.org", "invalid server \"dns.example.org\" of --upstream"),
            ("--upstream", "option --upstream needs a value: ADDRESS"),
            ("--upstreams x", "unknown option: --upstreams"),
            ("x", "unexpected argument \"x\""),
        ] {
            assert_eq!(read(line).unwrap_err().message(), message, "{line}");
        }
    }
}
