-- The claim walks from aggregate to aggregate of a bucket along this index: the unclaimed events but those set aside.
CREATE INDEX CONCURRENTLY IF NOT EXISTS {{name:outbox_walked}} ON {{outbox}} (
    {{outbox_bucket_of}}(aggregate_type, aggregate_id), {{outbox_hash_of}}(aggregate_type, aggregate_id), id
) WHERE status = 'pending' AND claimed_by IS NULL AND {{outbox_walked}}(parked, next_attempt_at, created_at)
