-- When the next scheduled or backed-off event falls due.
CREATE INDEX CONCURRENTLY IF NOT EXISTS {{name:outbox_due}} ON {{outbox}} (next_attempt_at)
    WHERE status = 'pending' AND claimed_by IS NULL
