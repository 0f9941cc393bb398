-- Parking: a claim walks from aggregate to aggregate, and one that cannot go is not to be met again at every round.
-- So the unclaimed events are of two classes: those in the walk, and those set aside, whose aggregates the walk
-- passes by. The protocol is written in src/store/mod.rs.
ALTER TABLE {{outbox}} ADD COLUMN IF NOT EXISTS parked BOOLEAN;

COMMENT ON COLUMN {{outbox}}.parked IS
    'Of a pending event, set by the relay: true, it stands behind one that holds its aggregate; false, put back into the walk; NULL, as next_attempt_at says.';

-- Is a pending, unclaimed event in the walk? One that nobody has touched is unless it is scheduled for later than it
-- was written, by more than what two clocks or two calls of the application's may differ. Never NULL, so that
-- an event is of exactly one class. Times that cannot be subtracted, infinite ones or too far apart, must not fail an
-- INSERT, hence the bounds. Inlined by the planner: no SET, not STRICT.
CREATE OR REPLACE FUNCTION {{outbox_walked}}(parked BOOLEAN, next_attempt_at TIMESTAMPTZ, created_at TIMESTAMPTZ) RETURNS BOOLEAN
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    AS $$
        SELECT coalesce(NOT parked, CASE
            WHEN next_attempt_at <= created_at THEN true
            WHEN created_at >= '1970-01-01 00:00:00+00'::timestamptz AND next_attempt_at < '3000-01-01 00:00:00+00'::timestamptz
                THEN next_attempt_at - created_at < '1 second'::interval
            ELSE false
        END, true)
    $$;

-- Tells that events of a bucket may go that could not: 'freed:' and the bucket, so that a transaction that frees
-- many rings 64 times at most.
CREATE OR REPLACE FUNCTION {{outbox_ring_freed}}() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    AS $$
    BEGIN
        IF current_setting('bellwire.ring', true) IS DISTINCT FROM 'off' THEN
            PERFORM pg_notify({{channel}}, 'freed:' || {{outbox_bucket_of}}(OLD.aggregate_type, OLD.aggregate_id));
        END IF;
        RETURN NULL;
    END
    $$;

-- An operator's plain SQL frees an aggregate: a dead event is replayed, given up, or holds no longer; any event is
-- put back; one that was still to go is given up or is to go sooner. None of this is what a relay does to the events
-- it has in hand.
DROP TRIGGER IF EXISTS {{name:outbox_ring_revive}} ON {{outbox}};
CREATE TRIGGER {{name:outbox_ring_revive}} AFTER UPDATE OF status, holds, next_attempt_at ON {{outbox}}
    FOR EACH ROW WHEN (
        OLD.status <> 'pending' AND NEW.status = 'pending'
        OR OLD.status = 'dead' AND (NEW.status <> 'dead' OR OLD.holds IS NOT FALSE AND NEW.holds IS FALSE)
        OR OLD.status = 'pending' AND OLD.claimed_by IS NULL
           AND (NEW.status <> 'pending' OR NEW.next_attempt_at < OLD.next_attempt_at)
    )
    EXECUTE FUNCTION {{outbox_ring_freed}}();

-- So does a DELETE. Pruning deletes published events only.
DROP TRIGGER IF EXISTS {{name:outbox_ring_delete}} ON {{outbox}};
CREATE TRIGGER {{name:outbox_ring_delete}} AFTER DELETE ON {{outbox}}
    FOR EACH ROW WHEN (OLD.status = 'dead' OR OLD.status = 'pending')
    EXECUTE FUNCTION {{outbox_ring_freed}}();
