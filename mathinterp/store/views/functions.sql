-- functions: what several views below need: p-values and 95 % intervals (docs/statistics.md says why these), what neurons are
-- ranked by, and mean and spread of a whole from those of its parts.
-- Rational approximations of W. J. Cody (Math. Comp. 23, 1969), relative error below 1e-12 up to erfc(26) = 1e-295.
CREATE OR REPLACE MACRO erfc_near_zero(z) AS  -- 1 - erf(x) for x <= 0.46875; z = x
    1 - z * ((((0.185777706184603153 * z*z + 3.16112374387056560) * z*z + 113.864154151050156) * z*z
             + 377.485237685302021) * z*z + 3209.37758913846947)
          / ((((z*z + 23.6012909523441209) * z*z + 244.024637934444173) * z*z
             + 1282.61652607737228) * z*z + 2844.23683343917062);
CREATE OR REPLACE MACRO erfc_middle(z) AS  -- 0.46875 <= z <= 4
    exp(-z*z) * ((((((((2.15311535474403846e-8 * z + 0.564188496988670089) * z + 8.88314979438837594) * z
             + 66.1191906371416295) * z + 298.635138197400131) * z + 881.952221241769090) * z
             + 1712.04761263407058) * z + 2051.07837782607147) * z + 1230.33935479799725)
          / ((((((((z + 15.7449261107098347) * z + 117.693950891312499) * z + 537.181101862009858) * z
             + 1621.38957456669019) * z + 3290.79923573345963) * z + 4362.61909014324716) * z
             + 3439.36767414372164) * z + 1230.33935480374942);
CREATE OR REPLACE MACRO erfc_tail(z, y) AS  -- z >= 4; y = 1 / (z * z)
    exp(-z*z) / z * (0.564189583547756287 - y
          * (((((0.0163153871373020978 * y + 0.305326634961232344) * y + 0.360344899949804439) * y
             + 0.125781726111229246) * y + 0.0160837851487422766) * y + 6.58749161529837803e-4)
          / (((((y + 2.56852019228982242) * y + 1.87295284992346725) * y
             + 0.527905102951428412) * y + 0.0605183413124413191) * y + 2.33520497626869185e-3));
CREATE OR REPLACE MACRO erfc(x) AS  -- x >= 0, DOUBLE
    CASE WHEN x <= 0.46875 THEN erfc_near_zero(x) WHEN x <= 4 THEN erfc_middle(x) ELSE erfc_tail(x, 1 / (x * x)) END;
-- A bound of an interval within a measure's range; null stays null, which least and greatest skip.
CREATE OR REPLACE MACRO within(bound, low, high) AS CASE WHEN bound IS NOT NULL THEN least(high, greatest(low, bound)) END;
-- Means of real numbers: Student's t over prompts. student_p: two-sided p of t with df degrees of freedom, by the continued
-- fraction of the incomplete beta function; student_95: the t of which that p is 0.05 (Cornish-Fisher, then Newton).
CREATE OR REPLACE MACRO beta_fraction(a, b, x) AS
    list_reduce(list_reverse(range(1, 81)), lambda later, k:
        1 + CASE WHEN k % 2 = 0 THEN (k // 2) * (b - k // 2) * x / ((a + k - 1) * (a + k))
                 ELSE -(a + k // 2) * (a + b + k // 2) * x / ((a + k - 1) * (a + k)) END / later, 1.0::DOUBLE);
CREATE OR REPLACE MACRO beta_tail(a, b, x) AS
    exp(lgamma(a + b) - lgamma(a) - lgamma(b) + a * ln(x) + b * ln(1 - x)) / a / beta_fraction(a, b, x);
CREATE OR REPLACE MACRO student_p(t, df) AS
    CASE WHEN t = 0 THEN 1.0::DOUBLE
         WHEN df / (df + t * t) < (df + 2) / (df + 5) THEN beta_tail(df / 2, 0.5, df / (df + t * t))
         ELSE 1 - beta_tail(0.5, df / 2, t * t / (df + t * t)) END;
CREATE OR REPLACE MACRO student_density(t, df) AS
    exp(lgamma((df + 1) / 2) - lgamma(df / 2) - (df + 1) / 2 * ln(1 + t * t / df)) / sqrt(df * pi());
CREATE OR REPLACE MACRO student_95(df) AS
    CASE WHEN df < 1 THEN NULL WHEN df = 1 THEN tan(pi() * 0.475) WHEN df = 2 THEN 0.95 * sqrt(2 / (1 - 0.95 ** 2))
         ELSE list_reduce([1, 2, 3], lambda t, step: t + (student_p(t, df) - 0.05) / (2 * student_density(t, df)),
             1.959963984540054 + 2.372271207 / df + 2.822520106 / df ** 2 + 2.555852783 / df ** 3 + 1.5891 / df ** 4) END;
-- Of a mean with its variance, over prompts of which the smallest operation has ``fewest``: half the interval is
-- student_factor * sqrt(variance), and p.
CREATE OR REPLACE MACRO student_factor(fewest) AS list_transform([fewest - 1.0::DOUBLE], lambda df: student_95(df))[1];
CREATE OR REPLACE MACRO mean_p(mean, variance, fewest) AS
    CASE WHEN mean = 0 THEN 1.0::DOUBLE WHEN fewest < 2 OR variance IS NULL THEN NULL
         WHEN variance = 0 THEN 2.0::DOUBLE ** (1 - fewest)  -- all alike: what flipping signs gives
         ELSE list_transform([abs(mean) / sqrt(variance)], lambda t: student_p(t, fewest - 1.0::DOUBLE))[1] END;
-- Aggregate: variance of sum(x) / sum(n) over clusters: G/(G-1) * sum (x - ratio n)^2 / (sum n)^2; null for one cluster.
CREATE OR REPLACE MACRO ratio_variance(x, n) AS
    CASE WHEN count(*) > 1 THEN count(*) / (count(*) - 1)
        * greatest(sum(x * x) - 2 * (sum(x) / sum(n)) * sum(x * n) + (sum(x) / sum(n)) ** 2 * sum(n * n), 0)::DOUBLE
        / sum(n)::DOUBLE ** 2 END;
-- Of a ratio of two means over the same prompts, part / whole, with their variances and covariance: an end (side -1 or 1) of
-- Fieller's interval; null where the whole is not surely other than 0.
CREATE OR REPLACE MACRO ratio_bound(part, whole, part_variance, both_variance, whole_variance, factor, side) AS
    list_transform([factor ** 2], lambda f2:  -- once: an expression in place of each f2 takes DuckDB seconds to plan
        CASE WHEN whole ** 2 > f2 * whole_variance THEN
            (part * whole - f2 * both_variance + side * sqrt(greatest(0,
                (part * whole - f2 * both_variance) ** 2
                - (whole ** 2 - f2 * whole_variance) * (part ** 2 - f2 * part_variance))))
            / (whole ** 2 - f2 * whole_variance) END)[1];
-- Accuracies: a score interval for paired shares (Tango 1998) at an effective number of units (Korn & Graubard 1998), and the
-- p-value of the same statistic, so that the two never contradict. Aggregate over the prompts of one operation, each with n
-- units of which fell were lost and rose won: a part. ratio: variance over prompts to that of as many single units; it is
-- drawn towards that of answers whose tokens are right or wrong together (``together``) as long as few prompts moved.
CREATE OR REPLACE MACRO pooled_ratio(moved, found, together) AS
    (moved * least(greatest(found, 0), 1.5 * together) + 4 * together) / (moved + 4);
CREATE OR REPLACE MACRO found_ratio(prompts, n, nn, fell, rose, variance) AS
    CASE WHEN variance IS NOT NULL AND fell + rose > 0 AND n * (fell + rose) > (fell - rose) ** 2
         THEN greatest(variance * prompts / ((fell + rose) / n - ((fell - rose) / n) ** 2), prompts / n)
         ELSE prompts * nn / n ** 2 END;
CREATE OR REPLACE MACRO score_units(prompts, moved, n, nn, fell, rose, variance) AS
    prompts / (pooled_ratio(moved, found_ratio(prompts, n, nn, fell, rose, variance), prompts * nn / n ** 2)
               * (1 + 0.3 / (moved + 1)));
CREATE OR REPLACE MACRO score_part(fell, rose, n) AS struct_pack(
    prompts := count(*), drop := (sum(fell) - sum(rose)) / sum(n), fell := sum(fell) / sum(n), rose := sum(rose) / sum(n),
    units := score_units(count(*), count_if(fell <> rose), sum(n)::DOUBLE, sum(n * n)::DOUBLE, sum(fell)::DOUBLE,
                         sum(rose)::DOUBLE, ratio_variance(fell - rose, n)));
-- Variance of one unit's change if the true drop is delta, the share that rises at its most likely value (Tango).
CREATE OR REPLACE MACRO risen_share(delta, fell, rose) AS least(
    greatest((fell + rose - (2 - fell + rose) * delta
              + sqrt(greatest((fell + rose - (2 - fell + rose) * delta) ** 2 + 8 * rose * delta * (1 - delta), 0))) / 4,
             0, -delta), greatest((1 - delta) / 2, 0));
CREATE OR REPLACE MACRO score_variance(delta, drop, parts) AS
    list_sum(list_transform(parts, lambda part:
        list_transform([least(greatest(part.drop + delta - drop, -1), 1)], lambda own:
            greatest(2 * risen_share(own, part.fell, part.rose) + own * (1 - own), 0))[1] / part.units)) / len(parts) ** 2;
-- How far the mean moves if every operation's drop moves by ``shift``, none beyond -1 or 1.
CREATE OR REPLACE MACRO score_moved(shift, parts) AS
    list_sum(list_transform(parts, lambda part: least(greatest(part.drop + shift, -1), 1) - part.drop)) / len(parts);
CREATE OR REPLACE MACRO score_bound(drop, parts, side) AS  -- side: -1 lower, 1 upper
    drop + list_transform([list_reduce(range(36), lambda found, step:
        CASE WHEN score_moved(side * (found + 0.5 ** step), parts) ** 2
                  <= 1.959963984540054 ** 2 * score_variance(drop + side * (found + 0.5 ** step), drop, parts)
             THEN found + 0.5 ** step ELSE found END, 0.0::DOUBLE)], lambda found: score_moved(side * found, parts))[1];
-- The shift, without its sign, under which the mean is 0.
CREATE OR REPLACE MACRO score_shift(drop, parts) AS
    CASE WHEN abs(score_moved(-drop, parts)) > abs(drop) - 1e-12 THEN abs(drop)
         ELSE list_reduce(range(36), lambda found, step:
             CASE WHEN abs(score_moved(-sign(drop) * (found + 0.5 ** step), parts)) <= abs(drop)
                  THEN found + 0.5 ** step ELSE found END, 0.0::DOUBLE) END;
CREATE OR REPLACE MACRO score_p(drop, parts) AS
    CASE WHEN abs(drop) < 1e-12 THEN 1.0::DOUBLE
         ELSE list_transform([score_shift(drop, parts)], lambda shift: list_transform(
             [abs(drop) / sqrt(2 * score_variance(drop - sign(drop) * shift, drop, parts))], lambda z: erfc(z))[1])[1] END;
-- A share of right units (no difference of two: nothing rises in it): Wilson's score interval with a continuity correction, at as many effective
-- units. Aggregate over prompts with n units each, of which hits were right; right and wrong are treated alike. As for drops,
-- the shares of several operations are shifted by the same amount, none beyond 0 or 1.
CREATE OR REPLACE MACRO share_part(hits, n) AS struct_pack(
    share := sum(hits) / sum(n),
    units := count(*) / pooled_ratio(least(count_if(hits > 0), count_if(hits < n)),
        found_ratio(count(*), sum(n)::DOUBLE, sum(n * n)::DOUBLE, sum(hits)::DOUBLE, 0, ratio_variance(hits, n)),
        count(*) * sum(n * n)::DOUBLE / sum(n)::DOUBLE ** 2));
CREATE OR REPLACE MACRO share_variance(share, seen, parts) AS
    list_sum(list_transform(parts, lambda part: list_transform([least(greatest(part.share + share - seen, 0), 1)], lambda own:
        own * (1 - own))[1] / part.units)) / len(parts) ** 2;
CREATE OR REPLACE MACRO share_step(parts) AS list_sum(list_transform(parts, lambda part: 0.5 / part.units)) / len(parts) ** 2;
CREATE OR REPLACE MACRO share_moved(shift, parts) AS
    list_sum(list_transform(parts, lambda part: least(greatest(part.share + shift, 0), 1) - part.share)) / len(parts);
CREATE OR REPLACE MACRO share_bound(share, parts, side) AS  -- side: -1 lower, 1 upper
    share + list_transform([list_reduce(range(36), lambda found, step:
        CASE WHEN greatest(abs(share_moved(side * (found + 0.5 ** step), parts)) - share_step(parts), 0) ** 2
                  <= 1.959963984540054 ** 2 * share_variance(share + side * (found + 0.5 ** step), share, parts)
             THEN found + 0.5 ** step ELSE found END, 0.0::DOUBLE)], lambda found: share_moved(side * found, parts))[1];
-- What a neuron scan ranks neurons by, largest first: the change of importance (importance where nothing was compared), its
-- size, or its part of the importance in the original.
CREATE OR REPLACE MACRO neuron_rank_key(ranking, change, importance) AS
    CASE ranking WHEN 'abs' THEN abs(coalesce(change, importance))
                 WHEN 'ratio' THEN CASE WHEN importance = 0 THEN 0 ELSE coalesce(change, importance) / abs(importance) END
                 ELSE coalesce(change, importance) END;
-- Of parts of n numbers each, with their means and standard deviations (divided by n): a part alone keeps its digits.
CREATE OR REPLACE MACRO pooled_mean(n, mean) AS
    CASE WHEN count(*) = 1 THEN any_value(mean)::DOUBLE ELSE sum(n * mean::DOUBLE) / sum(n) END;
CREATE OR REPLACE MACRO pooled_variance(n, mean, std) AS
    sum(n * (std::DOUBLE ** 2 + mean::DOUBLE ** 2)) / sum(n) - (sum(n * mean::DOUBLE) / sum(n)) ** 2;
CREATE OR REPLACE MACRO pooled_std(n, mean, std) AS
    CASE WHEN count(*) = 1 THEN any_value(std)::DOUBLE
         ELSE sqrt(greatest(pooled_variance(n, mean, std), 0 * pooled_variance(n, mean, std))) END;  -- null stays null
