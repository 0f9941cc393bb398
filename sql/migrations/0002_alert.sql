-- Alerts that were raised and not yet cleared: a row each. Whoever inserts or deletes one tells the
-- people, so that a fleet of relays tells them once.
CREATE TABLE IF NOT EXISTS {{outbox_alert}} (
    subject   TEXT PRIMARY KEY,
    since     TIMESTAMPTZ NOT NULL DEFAULT now(),
    raised_by TEXT NOT NULL
);
