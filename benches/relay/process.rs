//! A relay as users run it: a process of the binary, and what the system says of it.

use std::fs;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use tokio::process::{Child, Command};

use crate::options::{Options, Sink};
use crate::world::World;

/// The binary that Cargo built for this bench.
pub(crate) const BINARY: &str = env!("CARGO_BIN_EXE_bellwire");

/// A relay that is still to be started.
pub(crate) struct Prepared(Command);

impl Prepared {
    /// One variable of its environment.
    pub(crate) fn set(mut self, variable: &str, value: impl AsRef<str>) -> Self {
        self.0.env(variable, value.as_ref());
        self
    }

    /// Starts it; it carries what is in the world's outbox.
    pub(crate) fn start(mut self) -> Relay {
        Relay(self.0.spawn().expect("the binary starts"))
    }
}

/// Killed when dropped.
pub(crate) struct Relay(Child);

impl Relay {
    /// A relay of this bench's own binary.
    pub(crate) fn of(world: &World, options: &Options, sink: Sink) -> Prepared {
        Self::of_binary(Path::new(BINARY), world, options, sink)
    }

    pub(crate) fn of_binary(
        binary: &Path,
        world: &World,
        options: &Options,
        sink: Sink,
    ) -> Prepared {
        let foreign = std::env::vars_os().filter(|(name, _)| {
            // Somebody's own options would make the figures theirs.
            !name.to_string_lossy().starts_with("BELLWIRE_")
        });
        let mut command = Command::new(binary);
        command
            .arg("run")
            .env_clear()
            .envs(foreign)
            .current_dir(std::env::temp_dir())
            .stdin(Stdio::null())
            .kill_on_drop(true);
        let prepared = Prepared(command)
            .set("BELLWIRE_DATABASE__SCHEMA", &world.name)
            .set("BELLWIRE_RABBITMQ__EXCHANGE", &world.name)
            .set("BELLWIRE_RELAY__PARTITIONS", options.partitions.to_string())
            .set("BELLWIRE_RELAY__WINDOW", options.window.to_string())
            .set("BELLWIRE_RELAY__BATCH_SIZE", options.batch.to_string())
            .set("BELLWIRE_ADMIN__LISTEN", "off")
            .set("BELLWIRE_LOG__LEVEL", "warn");
        if sink == Sink::Jetstream {
            return prepared
                .set("BELLWIRE_RELAY__SINK", sink.setting())
                .set("BELLWIRE_JETSTREAM__STREAM", &world.name)
                .set("BELLWIRE_JETSTREAM__PREFIX", &world.name);
        }
        if sink == Sink::Kafka {
            return prepared.set("BELLWIRE_RELAY__SINK", sink.setting());
        }
        if sink == Sink::Null {
            // That events go nowhere is known here. Another build may not know the option.
            prepared
                .set("BELLWIRE_RELAY__SINK", sink.setting())
                .set("BELLWIRE_LOG__LEVEL", "error")
        } else {
            prepared
        }
    }

    /// Waits until it owns all buckets and can publish.
    pub(crate) async fn until_ready(&self, world: &World) {
        let owns_all =
            "SELECT count(*) = 64 FROM outbox_bucket JOIN outbox_replica USING (token) WHERE ready";
        world.until(owns_all).await;
    }

    /// Asks for the orderly end and waits for it.
    pub(crate) async fn stop(mut self) {
        let pid = i32::try_from(self.pid()).ok().and_then(Pid::from_raw);
        kill_process(pid.expect("a process id"), Signal::TERM).expect("it can be signalled");
        self.0.wait().await.expect("it ends");
    }

    fn pid(&self) -> u32 {
        self.0.id().expect("it runs")
    }

    /// The most memory that it had resident at any time, in MB of 1,000,000 bytes.
    pub(crate) fn peak_memory_mb(&self) -> f64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.pid()));
        let status = status.expect("it runs, on Linux");
        let kilobytes = status.lines().find_map(|line| {
            let value = line.strip_prefix("VmHWM:")?.strip_suffix("kB")?;
            value.trim().parse::<f64>().ok()
        });
        kilobytes.expect("the kernel tells VmHWM") * 1024.0 / 1_000_000.0
    }

    /// What it has had of the processors so far, of all threads that live.
    pub(crate) fn processor_time(&self) -> Duration {
        let threads = fs::read_dir(format!("/proc/{}/task", self.pid()));
        let nanoseconds = threads
            .expect("it runs, on Linux")
            .filter_map(|thread| fs::read_to_string(thread.ok()?.path().join("schedstat")).ok())
            .filter_map(|text| text.split_whitespace().next()?.parse::<u64>().ok())
            .sum();
        Duration::from_nanos(nanoseconds)
    }
}
