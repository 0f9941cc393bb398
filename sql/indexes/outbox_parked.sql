-- Of those set aside the ones that stand behind another, for the sweep.
CREATE INDEX CONCURRENTLY IF NOT EXISTS {{name:outbox_parked}} ON {{outbox}} (
    {{outbox_bucket_of}}(aggregate_type, aggregate_id), {{outbox_hash_of}}(aggregate_type, aggregate_id), id
) WHERE status = 'pending' AND claimed_by IS NULL AND parked
