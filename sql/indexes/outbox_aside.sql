-- The events set aside, of an aggregate that the claim visits: they keep their places among the others.
CREATE INDEX CONCURRENTLY IF NOT EXISTS {{name:outbox_aside}} ON {{outbox}} (
    {{outbox_bucket_of}}(aggregate_type, aggregate_id), {{outbox_hash_of}}(aggregate_type, aggregate_id), id
) WHERE status = 'pending' AND claimed_by IS NULL AND NOT {{outbox_walked}}(parked, next_attempt_at, created_at)
