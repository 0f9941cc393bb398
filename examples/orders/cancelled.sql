UPDATE orders SET status = 'cancelled', refund_due_cents = paid_cents, last_event_id = :event_id, updated_at = :now
WHERE order_id = :order_id AND status <> 'cancelled';

SELECT 'order ' || :order_id || ' not found' AS failure
WHERE NOT EXISTS (SELECT FROM orders WHERE order_id = :order_id);
