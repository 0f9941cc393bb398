-- When the next scheduled or backed-off event falls due. The predicate is written so that only a query
-- which repeats it can use the index: on a small table the planner would take it for the claim, too,
-- and keep that plan when the table has grown.
CREATE INDEX CONCURRENTLY IF NOT EXISTS {{name:outbox_due}} ON {{outbox}} (next_attempt_at)
    WHERE coalesce(status = 'pending' AND claimed_by IS NULL, false)
