#!/usr/bin/env python3
"""A minimal client of the container runtime interface (CRI).

  cri.py ready                            exit status 0 if the runtime's network is ready
  cri.py pod NAME [KEY=VALUE|HOST:PORT].. start a pod with annotations and host ports; prints its ID
  cri.py ips POD                          print the addresses of a pod
  cri.py run POD IMAGE COMMAND...         start a container in a pod; prints its ID
  cri.py exec CONTAINER COMMAND...        run a command in a container
  cri.py remove POD                       stop and remove a pod

Protocol buffers are encoded by hand: a message is a list of (field number, value)."""

import os
import sys
import uuid

import grpc

SOCKET = "unix:///run/{0}/{0}.sock".format(os.environ["CRI"])
SERVICE = "/runtime.v1.RuntimeService/"
POD_NAMESPACES = (2, [(1, [(2, 1)])])  # namespace options: pid: CONTAINER
CONTAINER = (15, [(2, [(3, [(2, 1)])])])


def number(value):
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes(out) + bytes([value])


def encode(fields):
    out = b""
    for field, value in fields:
        if isinstance(value, int):
            out += number(field << 3) + number(value)
            continue
        if isinstance(value, list):
            value = encode(value)
        elif isinstance(value, str):
            value = value.encode()
        out += number(field << 3 | 2) + number(len(value)) + value
    return out


def decode(data):
    """A dict of field numbers and lists of their values, numbers or bytes."""
    fields, at = {}, 0

    def read():
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(data):
        key = read()
        value = read()
        if key & 7 == 2:
            value, at = data[at:at + value], at + value
        fields.setdefault(key >> 3, []).append(value)
    return fields


def call(method, fields, timeout=120):
    with grpc.insecure_channel(SOCKET, options=[("grpc.default_authority", "localhost")]) as channel:
        method = channel.unary_unary(SERVICE + method, encode, decode)
        try:
            return method(fields, timeout=timeout)
        except grpc.RpcError as error:
            sys.exit(f"cri: {method}: {error.details()}")


def ready():
    for condition in decode(call("Status", [])[1][0])[1]:
        condition = decode(condition)
        if condition[1][0] == b"NetworkReady":
            sys.exit(0 if condition.get(2) else condition.get(4, [b"not ready"])[0].decode())
    sys.exit(1)


def pod(name, *extras):
    config = [(1, [(1, name), (2, str(uuid.uuid4())), (3, "default")]), (2, name), (3, "/run/logs")]
    for extra in extras:
        if "=" in extra:
            config.append((7, [(part, text) for part, text in enumerate(extra.split("=", 1), 1)]))
        else:
            host, port = extra.split(":")
            config.append((5, [(2, int(port)), (3, int(host))]))
    config.append((8, [(1, "/"), (2, [POD_NAMESPACES[1][0]])]))
    print(call("RunPodSandbox", [(1, config)])[1][0].decode())


def status(id):
    return decode(call("PodSandboxStatus", [(1, id)])[1][0])


def ips(id):
    network = decode(status(id)[5][0])
    print(network[1][0].decode(), *(decode(ip)[1][0].decode() for ip in network.get(2, [])))


def run(id, image, *command):
    metadata = decode(status(id)[2][0])
    sandbox = [(1, [(i, metadata[i][0]) for i in (1, 2, 3)]), (3, "/run/logs")]
    name = uuid.uuid4().hex[:8]
    config = [(1, [(1, name)]), (2, [(1, image), (18, image)]), (11, name)]
    config[2:2] = [(3, word) for word in command]
    fields = [(1, id), (2, config + [CONTAINER]), (3, sandbox)]
    container = call("CreateContainer", fields)[1][0].decode()
    call("StartContainer", [(1, container)])
    print(container)


def execute(id, *command):
    result = call("ExecSync", [(1, id)] + [(2, word) for word in command] + [(3, 60)])
    sys.stdout.buffer.write(result.get(1, [b""])[0])
    sys.stderr.buffer.write(result.get(2, [b""])[0])
    sys.exit(result.get(3, [0])[0])


def remove(id):
    # CRI-O waits for containers that ignore SIGTERM, until shortly before the deadline.
    for container in call("ListContainers", [(1, [(3, id)])]).get(1, []):
        call("StopContainer", [(1, decode(container)[1][0].decode())])
    call("StopPodSandbox", [(1, id)])
    call("RemovePodSandbox", [(1, id)])


if __name__ == "__main__":
    os.makedirs("/run/logs", exist_ok=True)
    commands = {"ready": ready, "pod": pod, "ips": ips, "run": run, "exec": execute, "remove": remove}
    commands[sys.argv[1]](*sys.argv[2:])
