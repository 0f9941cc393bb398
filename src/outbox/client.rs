//! Whose connection, and in which state: the types that `Outbox` takes.

use tokio_postgres::GenericClient;

mod sealed {
    pub trait Sealed {}

    impl Sealed for tokio_postgres::Client {}
    impl Sealed for tokio_postgres::Transaction<'_> {}
    impl Sealed for deadpool_postgres::Object {}
    impl Sealed for deadpool_postgres::ClientWrapper {}
    impl Sealed for deadpool_postgres::Transaction<'_> {}
    impl<C: super::AnyClient> Sealed for super::Begun<'_, C> {}
}

/// A connection, in a transaction or not: clients and transactions of tokio-postgres and of
/// deadpool-postgres. Sealed.
pub trait AnyClient: sealed::Sealed + Sync {
    /// What tokio-postgres has for it.
    type Driver: GenericClient + Sync;

    /// What runs the statements.
    fn driver(&self) -> &Self::Driver;
}

/// A transaction under way: those of tokio-postgres and of deadpool-postgres, savepoints too, and
/// [`Begun`]. Sealed.
pub trait AnyTransaction: sealed::Sealed + Sync {
    /// What tokio-postgres has for it.
    type Driver: GenericClient + Sync;

    /// What runs the statements.
    fn driver_within(&self) -> &Self::Driver;
}

/// A client on which you have begun a transaction by SQL, and will end it.
///
/// ```no_run
/// # use bellwire::outbox::{Begun, NewEvent, Outbox};
/// # async fn example(client: tokio_postgres::Client, outbox: Outbox) -> Result<(), Box<dyn std::error::Error>> {
/// client.batch_execute("BEGIN ISOLATION LEVEL SERIALIZABLE").await?;
/// let event = NewEvent::raw("order", "ORD-1", "OrderPlaced", "{}");
/// outbox.publish(&Begun(&client), &event).await?;
/// client.batch_execute("COMMIT").await?;
/// # Ok(())
/// # }
/// ```
///
/// Without a transaction the event would be committed by itself, whatever becomes of the state that it
/// tells of; nobody looks whether there is one.
#[derive(Clone, Copy, Debug)]
pub struct Begun<'a, C>(pub &'a C);

impl AnyClient for tokio_postgres::Client {
    type Driver = Self;

    fn driver(&self) -> &Self {
        self
    }
}

impl AnyClient for tokio_postgres::Transaction<'_> {
    type Driver = Self;

    fn driver(&self) -> &Self {
        self
    }
}

impl AnyClient for deadpool_postgres::Object {
    type Driver = tokio_postgres::Client;

    fn driver(&self) -> &Self::Driver {
        self
    }
}

impl AnyClient for deadpool_postgres::ClientWrapper {
    type Driver = tokio_postgres::Client;

    fn driver(&self) -> &Self::Driver {
        self
    }
}

impl<'a> AnyClient for deadpool_postgres::Transaction<'a> {
    type Driver = tokio_postgres::Transaction<'a>;

    fn driver(&self) -> &Self::Driver {
        self
    }
}

impl AnyTransaction for tokio_postgres::Transaction<'_> {
    type Driver = Self;

    fn driver_within(&self) -> &Self {
        self
    }
}

impl<'a> AnyTransaction for deadpool_postgres::Transaction<'a> {
    type Driver = tokio_postgres::Transaction<'a>;

    fn driver_within(&self) -> &Self::Driver {
        self
    }
}

impl<C: AnyClient> AnyTransaction for Begun<'_, C> {
    type Driver = C::Driver;

    fn driver_within(&self) -> &Self::Driver {
        self.0.driver()
    }
}
