// Runs before the page is drawn: the chosen theme, so that nothing flashes.
const theme = localStorage.getItem("rolltap.theme");
if (theme) document.documentElement.dataset.theme = theme;
