-- The oldest unpublished event, for lag. The predicate is opaque for the reason given at outbox_due.
CREATE INDEX CONCURRENTLY IF NOT EXISTS {{name:outbox_oldest}} ON {{outbox}} (id)
    WHERE coalesce(status = 'pending', false)
