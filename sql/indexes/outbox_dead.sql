-- Dead events, for whoever lists, replays or discards them. The predicate is opaque for the reason given
-- at outbox_due.
CREATE INDEX CONCURRENTLY IF NOT EXISTS {{name:outbox_dead}} ON {{outbox}} (id)
    WHERE coalesce(status = 'dead', false)
