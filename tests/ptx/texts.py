"""Small PTX texts of the kinds that NVIDIA's compilers and hand-written assembly produce."""

HEADER = ".version 8.8\n.target sm_100a\n.address_size 64\n"


def make_kernel(
    body: str, registers: str = ".reg .pred %p<99>; .reg .b32 %r<99>; .reg .b64 %rd<99>;"
) -> str:
    """Return a module with one kernel `k` of no parameters."""
    return f"{HEADER}.visible .entry k()\n{{\n{registers}\n{body}\n}}\n"


KITCHEN_SINK = (
    HEADER
    + r"""
// a comment; with a semicolon
.file 1 "/src/a.py"
.file	2 "b.py", 1700000000, 42
.pragma "nounroll", "x";
.extern .func  (.param .b32 func_retval0) vprintf
(
	.param .b64 vprintf_param_0,
	.param .b64 vprintf_param_1
)
;
.weak .func lonely;
.func (.param .align 8 .b8 pair[16]) twice(.param .b32 a, .reg .f32 b) .noreturn
{
	ret;
}
.visible .global .align 4 .u32 counter = 0x10U;
.global .attribute(.managed) .align 16 .v4 .f32 quad[2];
.const .align 8 .b8 table[4] = {1, 2, 0xff, -4};
.global .align 8 .u64 links[3] = {counter, generic(table)+8, twice};
.global .b8 bytes[2] = {0xff(counter), 0xff00(counter)};
.global .f32 grid2[2][2] = {{1.0, 0f3F800000}, {-2.5e3, 0d4000000000000000}};
.global .b8 message[] = {72, 105, 0};
.extern .shared .align 1024 .b8 dynamic[];
.shared .b64 barriers[4], other;
/* block ; comment
   over lines */
.visible .entry kernel$1(
	.param .u64 .ptr .global .align 16 kernel_param_0,
	.param .align 64 .b8 kernel_param_1[128],
	.param .b64 .ptr kernel_param_2
)
.reqntid 192, 1, 1
.minnctapersm 1
.explicitcluster
.reqnctapercluster 2, 1, 1
.pragma "fast";
{
	.reg .pred 	%p<3>;
	.reg .b32 	%r<10>, P1;
	.reg .b64 	%rd<4>;
	.reg .v4 .f32 v;
	.local .align 16 .b8 	stack[64];
	.loc	1 10 3
	ld.param.b64 	%rd1, [kernel_param_0];
	.loc	1 11 3, function_name $L__info_string0, inlined_at 1 10 3
	mov.u32 	%r1, %tid.x;
	@!%p1 bra.uni 	$L__BB0_2;
	mov.f32 v.x, 0f3F800000;
	mov.f32 %r1, 1.5;
	st.global.v4.f32 [%rd1+-8], v;
	ld.global.v2.b32 	{%r2, _}, [%rd1+4];
	ld.global.b32 %r2, [%rd1-4].unified;
	setp.lt.and.s32 %p1|%p2, %r1, -5, !%p2;
	elect.sync _|%p1, -1;
	mov.u64 %rd2, counter+4;
	mov.u32 %r3, WARP_SZ;
	add .s32 %r3, %r3, (1 << 4) | 0b11;
	and.b32 %r3, %r3, 017;
	vadd.s32.s32.s32 %r4, %r2.b0, %r3.h1;
	mov.b32 %r5, %envreg3;
	cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes
		[%r1], [%rd1, {%r2, %r3}], [%r4];
	tex.2d.v4.f32.s32 {%r1, %r2, %r3, %r4}, [%rd1, {%r5, %r6}];
	{
		.reg .pred P1;
		WAIT:
		mbarrier.try_wait.parity.shared.b64 P1, [%r1], %r2, 0x989680;
		@P1 bra DONE;
		bra WAIT;
		DONE:
	}
	{
		.reg .pred P1;
		WAIT:
		@!P1 bra WAIT;
	}
	brx.idx %r1, table0;
table0: .branchtargets $L__BB0_2, $L__BB0_3;
$L__BB0_2:
	{ // callseq 0, 0
	.param .b64 param0;
	st.param.b64 [param0], %rd1;
	.param .b32 retval0;
	call.uni (retval0), vprintf, (param0, param0);
	ld.param.b32 %r1, [retval0];
	}
	targets: .calltargets twice, lonely;
	call (%r1), %rd1, (%r2), targets;
	prototype_0 : .callprototype (.param .b32 _) _ (.param .b64 _, .param .b32 _);
	call %rd1, prototype_0;
$L__BB0_3:
	ret;
}
.alias again, twice;
.section	.debug_str
{
$L__info_string0:
.b8 109,97
.b8 0
.b32 .debug_abbrev+4
.b64 $L__info_string0-$L__info_string0
}
"""
)
