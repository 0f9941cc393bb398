-- The outbox and what the relay keeps beside it.
--
-- Works on an empty schema and on an outbox that the application made itself with the same base
-- columns: nothing is rewritten, every lock is short. Indexes are built afterwards, outside a
-- transaction (sql/indexes).

CREATE TABLE IF NOT EXISTS {{outbox}} (
    id              BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    aggregate_type  TEXT NOT NULL,
    aggregate_id    TEXT NOT NULL,
    event_type      TEXT NOT NULL,
    payload         JSONB NOT NULL,
    created_at      TIMESTAMPTZ NOT NULL DEFAULT now(),
    status          TEXT NOT NULL DEFAULT 'pending'
                    CHECK (status IN ('pending', 'published', 'dead', 'discarded')),
    attempts        INT NOT NULL DEFAULT 0,
    next_attempt_at TIMESTAMPTZ NOT NULL DEFAULT now(),
    claimed_by      TEXT,
    claimed_until   TIMESTAMPTZ,
    published_at    TIMESTAMPTZ,
    last_error      TEXT,
    failed_in       TEXT
);

-- Added without a default first, so that an adopted table is not rewritten: gen_random_uuid() is
-- volatile and would fill every row under an exclusive lock. Old rows are filled in chunks later.
ALTER TABLE {{outbox}} ADD COLUMN IF NOT EXISTS event_id UUID;
ALTER TABLE {{outbox}} ADD COLUMN IF NOT EXISTS correlation_id TEXT;
ALTER TABLE {{outbox}} ADD COLUMN IF NOT EXISTS headers JSONB;
ALTER TABLE {{outbox}} ADD COLUMN IF NOT EXISTS holds BOOLEAN;
ALTER TABLE {{outbox}} ALTER COLUMN event_id SET DEFAULT gen_random_uuid();

COMMENT ON COLUMN {{outbox}}.holds IS
    'Of a dead event: does it hold back the later events of its aggregate? NULL means yes.';

-- A queue's table turns over completely: vacuum by its churn, not by a fifth of its size.
ALTER TABLE {{outbox}} SET (autovacuum_vacuum_scale_factor = 0.02, autovacuum_analyze_scale_factor = 0.05);

-- An aggregate as one number: what the indexes are built on, since a text of any length must fit. Nested
-- hashes keep the pair a pair; COLLATE "C" makes the result the same under every collation. Two
-- aggregates of one number (of 2^64) would merely wait for each other. Both functions are inlined by the
-- planner: no SET, not STRICT.
CREATE OR REPLACE FUNCTION {{outbox_hash_of}}(aggregate_type TEXT, aggregate_id TEXT) RETURNS BIGINT
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    AS $$
        SELECT pg_catalog.hashtextextended(
            aggregate_id COLLATE pg_catalog."C",
            pg_catalog.hashtextextended(aggregate_type COLLATE pg_catalog."C", 0)
        )
    $$;

-- The bucket of an aggregate, 0..63.
CREATE OR REPLACE FUNCTION {{outbox_bucket_of}}(aggregate_type TEXT, aggregate_id TEXT) RETURNS INT
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    AS $$
        SELECT (pg_catalog.hashtextextended(
            aggregate_id COLLATE pg_catalog."C",
            pg_catalog.hashtextextended(aggregate_type COLLATE pg_catalog."C", 0)
        ) & 63)::int
    $$;

CREATE SEQUENCE IF NOT EXISTS {{outbox_token}} AS INT MINVALUE 1 CYCLE;

-- Each live process start is one row: its token and the token's one lease.
CREATE TABLE IF NOT EXISTS {{outbox_replica}} (
    token       INT PRIMARY KEY,
    name        TEXT NOT NULL,
    session_pid INT NOT NULL,
    started_at  TIMESTAMPTZ NOT NULL DEFAULT now(),
    lease_until TIMESTAMPTZ NOT NULL,
    ready       BOOLEAN NOT NULL DEFAULT false
);
COMMENT ON COLUMN {{outbox_replica}}.name IS 'What claimed_by of the outbox says.';
COMMENT ON COLUMN {{outbox_replica}}.session_pid IS
    'Backend that holds the token''s advisory lock; the lock gone from pg_locks means the process is.';
COMMENT ON COLUMN {{outbox_replica}}.ready IS 'Can it publish? Others leave it no buckets while it cannot.';

-- The authority on who may claim: rows of a bucket are claimed only under its token. The foreign
-- key makes it impossible that a bucket carries a token that no replica row stands for.
CREATE TABLE IF NOT EXISTS {{outbox_bucket}} (
    bucket INT PRIMARY KEY CHECK (bucket BETWEEN 0 AND 63),
    token  INT REFERENCES {{outbox_replica}} (token) ON DELETE SET NULL
);
INSERT INTO {{outbox_bucket}} (bucket) SELECT generate_series(0, 63) ON CONFLICT (bucket) DO NOTHING;

CREATE TABLE IF NOT EXISTS {{outbox_relay_state}} (
    id         INT PRIMARY KEY CHECK (id = 1),
    lagging    BOOLEAN NOT NULL DEFAULT false,
    changed_at TIMESTAMPTZ NOT NULL DEFAULT now()
);
INSERT INTO {{outbox_relay_state}} (id) VALUES (1) ON CONFLICT (id) DO NOTHING;

-- The wake-up. Empty payload: a long one would fail the application's own INSERT. SECURITY DEFINER
-- with a fixed search_path: writers need INSERT on the outbox and nothing else.
CREATE OR REPLACE FUNCTION {{outbox_ring}}() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    AS $$
    BEGIN
        -- NOTIFY makes PREPARE TRANSACTION fail: writers under two-phase commit set this to off.
        IF current_setting('bellwire.ring', true) IS DISTINCT FROM 'off' THEN
            PERFORM pg_notify({{channel}}, '');
        END IF;
        RETURN NULL;
    END
    $$;

DROP TRIGGER IF EXISTS {{name:outbox_ring_insert}} ON {{outbox}};
CREATE TRIGGER {{name:outbox_ring_insert}} AFTER INSERT ON {{outbox}}
    FOR EACH STATEMENT EXECUTE FUNCTION {{outbox_ring}}();

-- An operator's plain SQL (replay: dead to pending; give up: dead to discarded) frees an aggregate.
DROP TRIGGER IF EXISTS {{name:outbox_ring_revive}} ON {{outbox}};
CREATE TRIGGER {{name:outbox_ring_revive}} AFTER UPDATE OF status ON {{outbox}}
    FOR EACH ROW WHEN (OLD.status = 'dead' AND NEW.status <> 'dead')
    EXECUTE FUNCTION {{outbox_ring}}();
