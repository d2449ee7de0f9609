# The only front door: recipes wrap cargo and the scripts below tests/, and hold no logic.

CARGO   ?= cargo
TARGET  ?= $(shell rustc -vV | sed -n 's/^host: //p')
PREFIX  ?= /opt/cni
BINDIR  ?= $(PREFIX)/bin
DESTDIR ?=
PEER    ?= /usr/lib/cni
ARGS    ?=

STATIC  := -C target-feature=+crt-static
# SHA-512 of a few bytes is not worth asking the processor what it can do: under a hypervisor that
# question costs more than the sum.
STATIC  += --cfg sha2_backend="soft" --cfg sha2_backend_soft="compact"
BINARY  := target/$(TARGET)/release/cnibox

# Stripped size in bytes that no release may pass: 5 MB.
SIZE_LIMIT := 5000000

.PHONY: help build demo test test-vm lint arch bench size install clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 10

build: ## the static release binary, target/<target>/release/cnibox
	RUSTFLAGS='$(STATIC)' $(CARGO) build --release --locked --target $(TARGET)

demo: build ## two containers on one bridge in a private host: attach, look, ping, detach
	@tests/prepare.sh demo
	@tests/demo.sh $(BINARY)

test: build ## the whole suite: on this kernel, in a VM what this kernel lacks, then the demo
	tests/prepare.sh test
	CNIBOX_BIN=$(abspath $(BINARY)) tests/lanes.sh host-and-vm
	tests/demo.sh $(BINARY) >/dev/null

test-vm: build ## the tests for which this kernel lacks something, in a VM; ARGS=<pattern of names>
	tests/prepare.sh test
	CNIBOX_BIN=$(abspath $(BINARY)) tests/lanes.sh vm $(ARGS)

lint: ## formatting, clippy, documentation, licences and sources of dependencies, shell scripts
	$(CARGO) fmt --check
	$(CARGO) clippy --locked --all-targets -- -D warnings
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --locked --no-deps --quiet
	tests/prepare.sh lint
	$(CARGO) deny --log-level error check bans licenses sources
	shellcheck tests/*.sh .ci/run

arch: ## the layers of docs/architecture.md, checked in the source
	$(CARGO) test --locked --test arch

bench: build ## the same pods with two plugin folders in turn; PEER=<folder>, ARGS="bridge --pods 1000"
	tests/prepare.sh bench
	PEER=$(PEER) CNIBOX_BIN=$(abspath $(BINARY)) $(CARGO) bench --locked --bench pods -- $(ARGS)

size: build ## size of the binary against its limit
	@size=$$(stat -c %s $(BINARY)); echo "$$size bytes of $(SIZE_LIMIT)"; test $$size -le $(SIZE_LIMIT)

install: build ## the binary and a link per applet into DESTDIR/BINDIR (default /opt/cni/bin); ARGS="--mode copy"
	DESTDIR='$(DESTDIR)' $(BINARY) install $(BINDIR) $(ARGS)

clean: ## everything that was built
	$(CARGO) clean
