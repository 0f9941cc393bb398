-- The unpublished event that has been due for longest, for lag. An event that was never tried is due from
-- the time it is scheduled for, any other one from when it was written. The predicate is opaque for the
-- reason given at outbox_due.
CREATE INDEX CONCURRENTLY IF NOT EXISTS {{name:outbox_waiting}} ON {{outbox}} (
    (CASE WHEN attempts = 0 AND last_error IS NULL THEN greatest(created_at, next_attempt_at) ELSE created_at END)
) WHERE coalesce(status = 'pending', false)
