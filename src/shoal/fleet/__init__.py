"""Who works on this run and where: engines start and watch seats, membership tells them who they are."""
