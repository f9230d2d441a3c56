-- functions: what several views below need: the complementary error function, for p-values, what neurons are ranked by, and
-- mean and spread of a whole from those of its parts.
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
