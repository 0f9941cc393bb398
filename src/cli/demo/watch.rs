//! The loop that hears everything, kills the relay when it is time, and knows when it is over.

use std::time::{Duration, Instant};

use anyhow::Context as _;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::task::JoinSet;
use tokio::time::MissedTickBehavior;

use super::relays::{Relays, taken_over};
use super::report::{Findings, Kill, Progress};
use super::stage::{Reader, Stage};
use super::tally::{Arrival, Tally};
use super::{Arguments, write};

/// Without any commit or arrival for so long, what is missing counts as lost. Twice the lease if
/// that is longer: rows of a frozen relay wait for it.
const PATIENCE: Duration = Duration::from_secs(60);
/// Nothing arrives for so long: then no repeat is on its way either.
const QUIET: Duration = Duration::from_millis(500);
/// Between looks at the relays and redraws.
const TICK: Duration = Duration::from_millis(100);

/// What writers, consumer and takeover tell. Times are taken where things happen, so that it does
/// not matter how long the news wait to be heard.
pub(super) enum News {
    Committed {
        ids: Vec<i64>,
        at: Instant,
    },
    /// Events of a transaction or savepoint.
    RolledBack(usize),
    Arrived(Arrival),
    /// The buckets of the killed relay, after so long; none if never.
    TakenOver(Option<Duration>),
}

pub(super) struct Watch<'a> {
    stage: &'a Stage,
    arguments: &'a Arguments,
    progress: &'a Progress,
    tell: UnboundedSender<News>,
    news: UnboundedReceiver<News>,
    // Ends them when dropped.
    tasks: JoinSet<anyhow::Result<()>>,
    tally: Tally,
    rolled_back: usize,
    kill: Option<Kill>,
    takeover_is_open: bool,
    patience: Duration,
    last_progress: Instant,
}

impl<'a> Watch<'a> {
    /// Begins to read.
    pub(super) fn new(
        stage: &'a Stage,
        arguments: &'a Arguments,
        progress: &'a Progress,
        reader: Reader,
    ) -> Self {
        let (tell, news) = unbounded_channel();
        let mut tasks = JoinSet::new();
        tasks.spawn(reader.run(tell.clone()));
        Self {
            stage,
            arguments,
            progress,
            tell,
            news,
            tasks,
            tally: Tally::default(),
            rolled_back: 0,
            kill: None,
            takeover_is_open: false,
            patience: PATIENCE.max(stage.config().relay.lease * 2),
            last_progress: Instant::now(),
        }
    }

    /// Begins to write.
    pub(super) fn write(&mut self) {
        let Arguments {
            events,
            aggregates,
            writers,
            ..
        } = *self.arguments;
        for writer in write::share(events, aggregates, writers) {
            self.tasks
                .spawn(writer.run(self.stage.store().clone(), self.tell.clone()));
        }
        self.last_progress = Instant::now();
    }

    /// Until every event was committed and has arrived, or nothing moves any more.
    pub(super) async fn until_delivered(&mut self, relays: &mut Relays<'_>) -> anyhow::Result<()> {
        let mut tick = tokio::time::interval(TICK);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        while !self.all_delivered() || self.takeover_is_open {
            tokio::select! {
                Some(news) = self.news.recv() => self.hear(news),
                Some(ended) = self.tasks.join_next() => ended.context("a task of the demo failed")??,
                _ = tick.tick() => {
                    relays.check_alive()?;
                    self.progress.show(&self.tally);
                    if self.last_progress.elapsed() > self.patience {
                        break;
                    }
                }
            }
            if self.kill_is_due() {
                self.kill(relays).await?;
            }
        }
        Ok(())
    }

    /// Until no repeat can come any more: everything is recorded as published, and nothing arrives.
    /// Answers how much is not recorded.
    pub(super) async fn until_quiet(&mut self) -> anyhow::Result<i64> {
        let since = Instant::now();
        // What is lost is not recorded either, and was waited for already.
        let patience = if self.all_delivered() {
            self.patience
        } else {
            Duration::ZERO
        };
        loop {
            if let Ok(Some(news)) = tokio::time::timeout(QUIET, self.news.recv()).await {
                self.hear(news);
                continue;
            }
            let pending = self.stage.store().lag().await?.pending;
            if pending == 0 || since.elapsed() > patience {
                return Ok(pending);
            }
        }
    }

    pub(super) fn findings(self, unmarked: i64) -> Findings {
        Findings {
            verdict: self.tally.verdict(),
            rolled_back: self.rolled_back,
            kill: self.kill,
            unmarked,
        }
    }

    fn all_delivered(&self) -> bool {
        self.tally.delivered_count() == u64::from(self.arguments.events)
    }

    fn hear(&mut self, news: News) {
        match news {
            News::Committed { ids, at } => self.tally.committed(&ids, at),
            News::RolledBack(events) => self.rolled_back += events,
            News::Arrived(arrival) => self.tally.arrived(arrival),
            News::TakenOver(after) => {
                self.takeover_is_open = false;
                if let Some(kill) = &mut self.kill {
                    kill.taken_over = after;
                }
                return;
            }
        }
        self.last_progress = Instant::now();
    }

    /// Half of the events have arrived.
    fn kill_is_due(&self) -> bool {
        let half = u64::from(self.arguments.events.div_ceil(2));
        !self.arguments.no_kill && self.kill.is_none() && self.tally.delivered_count() >= half
    }

    async fn kill(&mut self, relays: &mut Relays<'_>) -> anyhow::Result<()> {
        let at = Instant::now();
        let relay = relays.kill_one().await?;
        let after = self.tally.delivered_count();
        self.progress.step(format!(
            "killed {relay} with SIGKILL after {after} deliveries"
        ));
        if self.arguments.relays == 1 {
            // Nobody is left to take over: it is started again, as a service manager would.
            relays.start()?;
        }
        self.kill = Some(Kill {
            relay: relay.clone(),
            after,
            taken_over: None,
        });
        self.takeover_is_open = true;
        let (store, tell, patience) =
            (self.stage.store().clone(), self.tell.clone(), self.patience);
        self.tasks.spawn(async move {
            let after = taken_over(&store, &relay, at, patience).await;
            // Nobody listens any more: the demo is over.
            let _ = tell.send(News::TakenOver(after));
            Ok(())
        });
        Ok(())
    }
}
