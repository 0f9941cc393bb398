-- Dead events that hold back their aggregate.
CREATE INDEX CONCURRENTLY IF NOT EXISTS {{name:outbox_holding}} ON {{outbox}} (
    {{outbox_hash_of}}(aggregate_type, aggregate_id), id
) WHERE status = 'dead' AND holds IS NOT FALSE
