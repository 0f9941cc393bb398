-- The oldest unpublished event, for lag.
CREATE INDEX CONCURRENTLY IF NOT EXISTS {{name:outbox_pending}} ON {{outbox}} (id) WHERE status = 'pending'
