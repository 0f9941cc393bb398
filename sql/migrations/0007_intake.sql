-- The intake: webhooks as they came, those that failed, and what was done when.

-- A row exists exactly if what it says was committed with it. The key is the arbiter of repeats.
CREATE TABLE IF NOT EXISTS {{outbox_webhook_events}} (
    source            TEXT NOT NULL,
    event_id          TEXT NOT NULL,
    event_type        TEXT,
    payload           BYTEA NOT NULL,
    payload_sha256    BYTEA NOT NULL,
    status            TEXT NOT NULL
                      CHECK (status IN ('received', 'processed', 'failed', 'dead_lettered', 'parked', 'discarded')),
    last_error        TEXT,
    received_at       TIMESTAMPTZ NOT NULL DEFAULT now(),
    processed_at      TIMESTAMPTZ,
    execution_id      TEXT,
    last_execution_id TEXT,
    PRIMARY KEY (source, event_id)
);
COMMENT ON COLUMN {{outbox_webhook_events}}.payload IS 'The bytes that were signed.';
COMMENT ON COLUMN {{outbox_webhook_events}}.status IS
    'received and failed are left by writers other than this version only; they are taken up after a while.';

-- What may be forgotten, by its time.
CREATE INDEX IF NOT EXISTS {{name:outbox_webhook_done}} ON {{outbox_webhook_events}} (source, received_at)
    WHERE status IN ('processed', 'discarded');
CREATE INDEX IF NOT EXISTS {{name:outbox_webhook_stranded}} ON {{outbox_webhook_events}} (received_at)
    WHERE status IN ('received', 'failed');

CREATE TABLE IF NOT EXISTS {{outbox_dead_letter}} (
    source          TEXT NOT NULL,
    event_id        TEXT NOT NULL,
    event_type      TEXT,
    reason_class    TEXT NOT NULL,
    last_error      TEXT NOT NULL,
    attempts        INT NOT NULL,
    status          TEXT NOT NULL CHECK (status IN ('retryable', 'parked', 'resolved', 'discarded')),
    first_failed_at TIMESTAMPTZ NOT NULL,
    last_failed_at  TIMESTAMPTZ NOT NULL,
    resolved_at     TIMESTAMPTZ,
    claimed_by      TEXT,
    claimed_at      TIMESTAMPTZ,
    PRIMARY KEY (source, event_id),
    FOREIGN KEY (source, event_id) REFERENCES {{outbox_webhook_events}} (source, event_id) ON DELETE CASCADE
);
COMMENT ON COLUMN {{outbox_dead_letter}}.claimed_by IS 'The replay that has it in hand.';

CREATE INDEX IF NOT EXISTS {{name:outbox_dead_letter_open}} ON {{outbox_dead_letter}} (first_failed_at, source, event_id)
    WHERE status IN ('retryable', 'parked');

CREATE TABLE IF NOT EXISTS {{outbox_intake_audit}} (
    id           BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    execution_id TEXT NOT NULL,
    mode         TEXT NOT NULL CHECK (mode IN ('intake', 'replay', 'discard')),
    outcome      TEXT NOT NULL,
    source       TEXT NOT NULL,
    event_id     TEXT NOT NULL,
    finished_at  TIMESTAMPTZ NOT NULL DEFAULT now()
);
CREATE INDEX IF NOT EXISTS {{name:outbox_intake_audit_finished}} ON {{outbox_intake_audit}} (finished_at);
