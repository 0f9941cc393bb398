UPDATE orders SET status = 'paid', paid_cents = :amount_cents::bigint, last_event_id = :event_id, updated_at = :now
WHERE order_id = :order_id AND status = 'created';

-- A row with a column `failure` is the handler's own failure: the event becomes a dead letter, to be replayed.
SELECT 'order ' || :order_id || ' not found (paid arrived before created)' AS failure
WHERE NOT EXISTS (SELECT FROM orders WHERE order_id = :order_id);
