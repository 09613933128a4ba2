"use strict";

// A run is shown or hidden in every chart at once; report.js leaves hidden runs out of the read-out.
for (const button of document.querySelectorAll("button.run")) {
  button.addEventListener("click", () => {
    const shown = button.getAttribute("aria-pressed") !== "true";
    button.setAttribute("aria-pressed", String(shown));
    for (const part of document.querySelectorAll(`figure [data-run="${button.dataset.run}"]`)) {
      part.classList.toggle("off", !shown);
    }
  });
}
