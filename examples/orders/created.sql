INSERT INTO orders (order_id, customer_email, amount_cents, currency, status, last_event_id, updated_at)
VALUES (:order_id, :customer_email, :amount_cents::bigint, :currency, 'created', :event_id, :now)
ON CONFLICT (order_id) DO NOTHING;
