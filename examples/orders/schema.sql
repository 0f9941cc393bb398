-- What the example's handlers write to. Of the application: run it yourself, beside `bellwire migrate`.

CREATE TABLE IF NOT EXISTS orders (
    order_id         TEXT PRIMARY KEY,
    customer_email   TEXT,
    amount_cents     BIGINT NOT NULL,
    currency         TEXT NOT NULL,
    status           TEXT NOT NULL CHECK (status IN ('created', 'paid', 'cancelled')),
    paid_cents       BIGINT NOT NULL DEFAULT 0,
    refund_due_cents BIGINT NOT NULL DEFAULT 0,
    last_event_id    TEXT,
    updated_at       TIMESTAMPTZ
);

-- A rule of the database, whatever a handler says: a payment is the order's total.
CREATE OR REPLACE FUNCTION payment_must_match_total() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'payment does not match the order total';
END
$$;

DROP TRIGGER IF EXISTS payment_must_match_total ON orders;
CREATE TRIGGER payment_must_match_total BEFORE UPDATE OF paid_cents ON orders
    FOR EACH ROW WHEN (NEW.paid_cents <> 0 AND NEW.paid_cents <> OLD.amount_cents)
    EXECUTE FUNCTION payment_must_match_total();
