#!/usr/bin/env python3
"""What containerd 2 and CRI-O 1.37 call of plugins, in their order, with the commands of cri.py; a pod is a network
namespace. CRI says which one: imitated-containerd or imitated-crio.

  imitated.py start                    what the runtime calls when it starts
  imitated.py ready                    exit status 0 if the runtime's network is ready
  imitated.py pod NAME [HOST:PORT]..   start a pod with host ports; prints its ID
  imitated.py ips POD                  print the addresses of a pod
  imitated.py remove POD               stop and remove a pod

containerd 2 (go-cni): STATUS of the first network in the directory whenever the kubelet asks for its state, every five
seconds, without a limit of time; ADD of loopback and of the network at the same time; DEL of both, and again without a
namespace. It calls neither CHECK nor GC.

CRI-O (ocicni): VERSION of all plugins of all files; STATUS of the first network every half second until it succeeds,
and then never again unless cni_status_grace_period is set; then GC of all networks of the directory, with the pods that
it has restored, which are in the first one, in 30 seconds; ADD, and CHECK after it; DEL with the cached configuration in
one minute."""

import json
import os
import subprocess
import sys
import time
import uuid
from concurrent.futures import ThreadPoolExecutor

from libcni import Attachment, Failed, Library, is_at_least, load, of_cache, read

CONF = "/etc/cni/net.d"
RUNTIME = os.environ["CRI"].removeprefix("imitated-")
STATE = os.path.join(os.environ["WORK"], "imitated")
LOOPBACK = load('{"cniVersion": "0.3.1", "name": "cni-loopback", "plugins": [{"type": "loopback"}]}')


def ip(*words):
    subprocess.run(["ip", *words], check=True)


def networks():
    """Those of the directory, in the order of the names of the files."""
    for name in sorted(os.listdir(CONF)):
        if os.path.splitext(name)[1] in (".conf", ".conflist", ".json"):
            yield read(os.path.join(CONF, name))


def first():
    for network in networks():
        return network
    raise Failed(f"no CNI configuration file in {CONF}")


def names():
    """The pods that the runtime has."""
    return [name.removesuffix(".json") for name in os.listdir(STATE) if name.endswith(".json")]


def pod_of(id):
    with open(os.path.join(STATE, id + ".json"), encoding="utf-8") as file:
        return json.load(file)


class Containerd:
    def start(self):
        pass

    def ready(self):
        Library().status(first())

    def attach(self, pod, ports):
        mapping = [{"HostPort": int(host), "ContainerPort": int(port), "Protocol": "tcp", "HostIP": ""} for host, port in ports]
        pod["capabilities"] = {"io.kubernetes.cri.pod-annotations": {}, **({"portMappings": mapping} if mapping else {})}
        with ThreadPoolExecutor() as both:
            ends = [both.submit(Library().add, *network) for network in self.networks(pod)]
        for end in ends:
            end.result()

    def networks(self, pod):
        of = {"args": arguments(pod), "capabilities": pod["capabilities"]}
        yield LOOPBACK, Attachment(pod["id"], pod["netns"], "lo", **of)
        yield first(), Attachment(pod["id"], pod["netns"], "eth0", **of)

    def detach(self, pod):
        """StopPodSandbox; then RemovePodSandbox, for which the namespace has ended."""
        for network, of in self.networks(pod):
            Library().delete(network, of)
        ip("netns", "delete", os.path.basename(pod["netns"]))
        for network, of in self.networks({**pod, "netns": ""}):
            Library().delete(network, of)


class Crio:
    READY = os.path.join(STATE, "ready")

    def start(self):
        if os.path.exists(self.READY):
            os.remove(self.READY)
        for _ in range(20):
            try:
                return self.ready()
            except Failed as error:
                print(f"not ready: {error}", file=sys.stderr)
                time.sleep(0.5)
        sys.exit("not ready")

    def usable(self):
        for network in networks():
            try:
                Library().validate(network)
                yield network
            except Failed as error:
                print(f"{network[0]['name']} is skipped: {error}", file=sys.stderr)

    def ready(self):
        if os.path.exists(self.READY):
            return
        usable = list(self.usable())
        default = usable[0]
        Library().status(default)
        pods = [(id, "eth0") for id in names()]
        for network in usable:
            # A network twice: the first file counts.
            valid = pods if network[0]["name"] == default[0]["name"] else []
            try:
                Library(timeout=30).collect(network, valid)
            except Failed as error:
                print(f"Error while GCing network {network[0]['name']}: {error}", file=sys.stderr)
        with open(self.READY, "w", encoding="utf-8"):
            pass

    def attach(self, pod, ports):
        # Host ports are CRI-O's own, without a plugin.
        assert not ports
        ip("-n", os.path.basename(pod["netns"]), "link", "set", "lo", "up")
        capabilities = {"cgroupPath": "/", "io.kubernetes.cri.pod-annotations": {}}
        network, of = first(), Attachment(pod["id"], pod["netns"], "eth0", arguments(pod), capabilities)
        Library(timeout=300).add(network, of)
        if is_at_least(network[0], "0.4.0"):
            Library(timeout=300).check(*of_cache(Library(), network[0]["name"], of.id, of.ifname))

    def detach(self, pod):
        """A pod that ADD has refused is not in the cache."""
        network, of = of_cache(Library(), first()[0]["name"], pod["id"], "eth0")
        if not of:
            network, of = first(), Attachment(pod["id"], pod["netns"], "eth0", arguments(pod))
        Library(timeout=60).delete(network, of)
        ip("netns", "delete", os.path.basename(pod["netns"]))


def arguments(pod):
    return [("IgnoreUnknown", "1"), ("K8S_POD_NAMESPACE", "default"), ("K8S_POD_NAME", pod["name"]),
            ("K8S_POD_INFRA_CONTAINER_ID", pod["id"]), ("K8S_POD_UID", pod["uid"])]


def start_pod(runtime, name, *ports):
    id, netns = uuid.uuid4().hex * 2, f"cni-{uuid.uuid4()}"
    pod = {"id": id, "name": name, "uid": str(uuid.uuid4()), "netns": f"/run/netns/{netns}"}
    ip("netns", "add", netns)
    try:
        runtime.attach(pod, [port.split(":") for port in ports])
    except Failed:
        runtime.detach(pod)
        raise
    with open(os.path.join(STATE, id + ".json"), "w", encoding="utf-8") as file:
        json.dump(pod, file)
    print(id)


def remove(runtime, id):
    runtime.detach(pod_of(id))
    os.remove(os.path.join(STATE, id + ".json"))


def ips(_, id):
    cached = Library().cached(first()[0]["name"], Attachment(id, "", "eth0"))
    print(*(ip["address"].split("/")[0] for ip in cached["result"]["ips"]))


if __name__ == "__main__":
    os.makedirs(STATE, exist_ok=True)
    made = {"containerd": Containerd, "crio": Crio}[RUNTIME]()
    commands = {"pod": start_pod, "ips": ips, "remove": remove}
    try:
        if sys.argv[1] in commands:
            commands[sys.argv[1]](made, *sys.argv[2:])
        else:
            {"start": made.start, "ready": made.ready}[sys.argv[1]]()
    except Failed as error:
        sys.exit(f"cri: Network plugin returns error: {error}")
