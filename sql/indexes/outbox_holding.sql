-- Dead events that hold back their aggregate.
CREATE INDEX CONCURRENTLY IF NOT EXISTS {{name:outbox_holding}} ON {{outbox}} (
    aggregate_type COLLATE "C", aggregate_id COLLATE "C", id
) WHERE status = 'dead' AND holds IS NOT FALSE
