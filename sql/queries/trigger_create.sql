-- The insert trigger, where it was left out before. As in the first migration.
CREATE TRIGGER {{name:outbox_ring_insert}} AFTER INSERT ON {{outbox}}
    FOR EACH STATEMENT EXECUTE FUNCTION {{outbox_ring}}()
