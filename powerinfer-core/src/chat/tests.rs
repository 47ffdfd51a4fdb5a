//! Templates in the shapes that published models use.
