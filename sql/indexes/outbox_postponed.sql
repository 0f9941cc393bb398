-- Of those set aside the ones that wait for their time, for the promotion.
CREATE INDEX CONCURRENTLY IF NOT EXISTS {{name:outbox_postponed}} ON {{outbox}} (
    {{outbox_bucket_of}}(aggregate_type, aggregate_id), next_attempt_at
) WHERE status = 'pending' AND claimed_by IS NULL AND parked IS NULL
    AND NOT {{outbox_walked}}(parked, next_attempt_at, created_at)
