#!/usr/bin/env python3
"""A name server that has one address for all names, and a question to it.

  dns.py serve PORT...                    answer at these ports, by UDP and by TCP, with $ADDRESS [10.96.7.20]
  dns.py ask udp|tcp ADDRESS [PORT]       exit status 0 if the server at ADDRESS answers"""

import os
import socket
import socketserver
import struct
import sys
import threading

ADDRESS = socket.inet_aton(os.environ.get("ADDRESS", "10.96.7.20"))
NAME = b"\3web\7default\3svc\7cluster\5local\0"
QUESTION = struct.pack(">6H", 7, 0x100, 1, 0, 0, 0) + NAME + struct.pack(">2H", 1, 1)


def answer(message):
    header = message[:2] + struct.pack(">5H", 0x8180, 1, 1, 0, 0)
    # Without what is behind the question, as EDNS.
    question = message[12:message.index(b"\0", 12) + 5]
    record = struct.pack(">3HIH", 0xC00C, 1, 1, 5, 4) + ADDRESS
    return header + question + record


def with_length(message):
    return struct.pack(">H", len(message)) + message


class Datagram(socketserver.BaseRequestHandler):
    def handle(self):
        question, server = self.request
        server.sendto(answer(question), self.client_address)


class Stream(socketserver.BaseRequestHandler):
    def handle(self):
        self.request.sendall(with_length(answer(self.request.recv(512)[2:])))


def serve(*ports):
    for port in ports:
        for kind, handler in ((socketserver.UDPServer, Datagram), (socketserver.TCPServer, Stream)):
            server = kind(("", int(port)), handler)
            threading.Thread(target=server.serve_forever).start()


def ask(protocol, address, port=53):
    is_datagram = protocol == "udp"
    question, wanted = QUESTION, answer(QUESTION)
    if not is_datagram:
        question, wanted = with_length(question), with_length(wanted)
    # Connected, because another address must not answer.
    with socket.socket(type=socket.SOCK_DGRAM if is_datagram else socket.SOCK_STREAM) as server:
        server.settimeout(1)
        server.connect((address, int(port)))
        server.send(question)
        sys.exit(server.recv(512) != wanted)


if __name__ == "__main__":
    {"serve": serve, "ask": ask}[sys.argv[1]](*sys.argv[2:])
