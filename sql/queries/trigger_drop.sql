-- Leave out the insert trigger, for relays that poll. That of revived events stays: it fires only on an
-- operator's hand, and costs writers nothing.
DROP TRIGGER IF EXISTS {{name:outbox_ring_insert}} ON {{outbox}}
