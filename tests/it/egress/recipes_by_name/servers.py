"""Web servers of many names at all addresses: what is in the directory NAME below the current one is the site of NAME.

servers.py PORT...: HTTP at port 80, HTTPS at the other ports. Prints "ready" to stderr when it serves."""

import http.server
import os
import socket
import ssl
import sys
import threading


class Handler(http.server.SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def send_head(self):
        name = self.headers.get("Host", "").split(":")[0]
        self.directory = os.path.join(os.getcwd(), name or "none")
        return super().send_head()


class Server(http.server.ThreadingHTTPServer):
    address_family = socket.AF_INET6
    request_queue_size = 64

    def server_bind(self):
        self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()


context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
context.load_cert_chain("tls.crt", "tls.key")
for port in map(int, sys.argv[1:]):
    server = Server(("::", port), Handler)
    if port != 80:
        # The thread of a connection does the handshake.
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    threading.Thread(target=server.serve_forever).start()
print("ready", file=sys.stderr, flush=True)
