# A Rust toolchain, and what Debian calls build-essential, is all that has to be there: the servers that the demo, the tests
# and the benches need are found, or installed, and run privately by scripts/services.

# Bash, because the values in the env file are quoted for it.
SHELL := bash
SERVICES := target/services
with_services = set -a; . $(SERVICES)/env; set +a;

# For every cargo command that builds; CI passes --locked.
CARGO_FLAGS ?=

.DEFAULT_GOAL := help
.PHONY: help demo demo-intake test test-kafka test-postgres test-failpoints bench chaos fuzz lint lint-fmt lint-clippy lint-features lint-doc lint-shell lint-alerts fmt services stop clean
# Cargo uses all cores and locks its directory; two at once only wait for each other.
.NOTPARALLEL:
# Under `make -j` it would tell cargo of a jobserver that only sub-makes can reach.
unexport MAKEFLAGS

help: ## this list
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 22

# Where the demo's events go: rabbitmq, jetstream or kafka.
SINK ?= rabbitmq

# PgBouncer is for tests only; NATS is needed where events go there.
demo demo-intake bench chaos: SERVICES_FLAGS = --no-pooler$(if $(filter jetstream,$(SINK)),, --no-nats)$(if $(filter kafka,$(SINK)), --kafka)
bench: SINK = jetstream

demo: services ## see events go from PostgreSQL to RabbitMQ, or with SINK=jetstream or SINK=kafka (DEMO_ARGS)
	@cargo build --release $(CARGO_FLAGS)
	@$(with_services) cargo run --release --quiet $(CARGO_FLAGS) -- demo --sink $(SINK) $(DEMO_ARGS)

demo-intake: services ## see a signed webhook become a row, and a message on RabbitMQ
	@cargo build --release $(CARGO_FLAGS)
	@$(with_services) scripts/demo-intake target/release/bellwire

# Plain cargo would run the tests that stop a server beside those that use it, hence one at a time there.
test: services ## all tests, with cargo-nextest where it is installed (TEST_ARGS filters, and leaves out the doctests)
	@$(with_services) \
	if cargo nextest --version >/dev/null 2>&1; then \
	    cargo nextest run $(CARGO_FLAGS) $(TEST_ARGS); \
	else \
	    cargo test --tests $(CARGO_FLAGS) $(TEST_ARGS) -- --test-threads=1; \
	fi
ifeq ($(strip $(TEST_ARGS)),)
	@$(with_services) cargo test --doc $(CARGO_FLAGS)
endif

# With a broker that cargo builds, unless KAFKA_BOOTSTRAP_SERVERS names one.
test-kafka: SERVICES_FLAGS := --no-pooler --no-nats --kafka
test-kafka: services ## the tests of the Kafka sink against a real broker (TEST_ARGS filters)
	@$(with_services) \
	if cargo nextest --version >/dev/null 2>&1; then \
	    cargo nextest run $(CARGO_FLAGS) -E 'test(/^(conformance::)?kafka::/)' $(TEST_ARGS); \
	else \
	    cargo test --test it $(CARGO_FLAGS) $(TEST_ARGS) kafka:: -- --test-threads=1; \
	fi

# The tests that concern the database; over servers of their own, so that those of the other targets stay as they are.
POSTGRES_TESTS := library embedded delivery ordering parking parking_hammer crash shutdown replicas plans roles wakeup \
    doorbell strict outage pooler failover exclusive configuration fidelity migration adoption admin lag dead prune tail \
    intake intake_edge intake_replay intake_vectors
test-postgres: SERVICES := target/services-$(VERSION)
test-postgres: SERVICES_FLAGS = --no-nats --postgres $(or $(VERSION),'')
test-postgres: services ## the tests that concern the database against VERSION=13, 14, ... of PostgreSQL (TEST_ARGS filters)
	@set -e; trap 'scripts/services down --dir $(SERVICES)' EXIT; $(with_services) \
	scripts/services psql --dir $(SERVICES) --no-align --tuples-only --command 'SELECT version()'; \
	if cargo nextest --version >/dev/null 2>&1; then \
	    cargo nextest run $(CARGO_FLAGS) -E 'test(/^($(subst $() ,|,$(strip $(POSTGRES_TESTS))))::/)' $(TEST_ARGS); \
	else \
	    cargo test --test it $(CARGO_FLAGS) $(TEST_ARGS) -- --test-threads=1 $(addsuffix ::,$(POSTGRES_TESTS)); \
	fi

# Of another build of the crate, with fail points in it.
FAILPOINTS := --test failpoints --features failpoints
test-failpoints: SERVICES_FLAGS := --no-pooler --no-nats
test-failpoints: services ## relays that crash before and after each step of their work (TEST_ARGS filters)
	@$(with_services) \
	if cargo nextest --version >/dev/null 2>&1; then \
	    cargo nextest run $(CARGO_FLAGS) $(FAILPOINTS) $(TEST_ARGS); \
	else \
	    cargo test $(CARGO_FLAGS) $(FAILPOINTS) $(TEST_ARGS) -- --test-threads=1; \
	fi

bench: services ## the relay's throughput and latency (BENCH_ARGS)
	@$(with_services) cargo bench --bench relay $(CARGO_FLAGS) -- $(BENCH_ARGS)

# Standard output is the report alone.
chaos: ## relays, servers and network fail for 15 minutes while it is judged what arrives (CHAOS_ARGS)
	@scripts/services up --dir $(SERVICES) $(SERVICES_FLAGS) >&2
	@$(with_services) cargo test --quiet --test chaos $(CARGO_FLAGS) -- run $(CHAOS_ARGS)

# Of each target. FUZZ_TARGETS names fewer; without Kafka's, whose client takes long to build, unless named.
FUZZ_SECONDS ?= 10
FUZZ_TARGETS ?= $(filter-out kafka_message,$(patsubst fuzz/fuzz_targets/%.rs,%,$(wildcard fuzz/fuzz_targets/*.rs)))
HOST = $(shell rustc -vV | sed -n 's/^host: //p')
# As cargo-fuzz does it, but for its sanitizers, which need a nightly compiler.
FUZZ_RUSTFLAGS := --cfg fuzzing -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
    -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
    -Cllvm-args=-sanitizer-coverage-trace-compares

fuzz: ## every parser takes whatever libFuzzer makes up (FUZZ_SECONDS for each, FUZZ_TARGETS, FUZZ_ARGS)
	@RUSTFLAGS='$(FUZZ_RUSTFLAGS)' cargo build --release --manifest-path fuzz/Cargo.toml --target $(HOST) $(CARGO_FLAGS) \
	    $(if $(filter kafka_message,$(FUZZ_TARGETS)),--features kafka) $(FUZZ_TARGETS:%=--bin %)
	@set -eo pipefail; for target in $(FUZZ_TARGETS); do \
	    echo "fuzz $$target"; \
	    mkdir -p "fuzz/artifacts/$$target" "target/fuzz/$$target"; \
	    "fuzz/target/$(HOST)/release/$$target" -max_total_time=$(FUZZ_SECONDS) -timeout=10 -rss_limit_mb=512 -verbosity=0 \
	        -print_final_stats=1 -artifact_prefix="fuzz/artifacts/$$target/" $(FUZZ_ARGS) "target/fuzz/$$target" "fuzz/corpus/$$target" 2>&1 \
	        | sed '/ Recommended dictionary/,/ End of recommended/d'; \
	done

lint: lint-fmt lint-clippy lint-features lint-doc lint-shell lint-alerts ## what CI checks beside the tests

lint-fmt:
	cargo fmt --check

lint-clippy:
	cargo clippy --all-targets $(CARGO_FLAGS) -- -D warnings

# Each sink without the others, and none; and what only the fail points' build has.
lint-features:
	@set -e; for features in '' rabbitmq jetstream kafka; do \
	    echo "cargo clippy --no-default-features --features '$$features'"; \
	    cargo clippy --quiet --lib --bins --no-default-features --features "$$features" $(CARGO_FLAGS) -- -D warnings; \
	done
	cargo clippy --quiet --lib $(FAILPOINTS) $(CARGO_FLAGS) -- -D warnings

lint-doc:
	RUSTDOCFLAGS='-D warnings' cargo doc --no-deps $(CARGO_FLAGS)

lint-shell:
	@if command -v shellcheck >/dev/null; then \
	    echo 'shellcheck scripts/services scripts/demo-intake .ci/run'; \
	    shellcheck scripts/services scripts/demo-intake .ci/run; \
	else \
	    echo 'shellcheck is not installed: the scripts were not checked'; \
	fi

lint-alerts:
	@if command -v promtool >/dev/null; then \
	    set -ex; \
	    promtool check config docker/prometheus.yml; \
	    promtool test rules docker/alerts_test.yml; \
	else \
	    echo 'promtool is not installed (Debian: prometheus): THE ALERT RULES WERE NOT CHECKED'; \
	fi

fmt: ## format the code
	cargo fmt

services: ## start the private servers, or find them running
	@scripts/services up --dir $(SERVICES) $(SERVICES_FLAGS)

stop: ## stop them and remove their data
	@set -e; for dir in $(SERVICES) $(wildcard $(SERVICES)-*); do scripts/services down --dir "$$dir"; done

# The servers first: their data is below target, and some of it may be elsewhere.
clean: stop ## stop the servers and remove all that was built
	cargo clean
